"""Writer threads: a complete sample in host memory becomes staged files and a receipt.

The threads run in the engine's worker process, beside the engine: tensors never pass through a queue between
processes. Memory is bounded; when the writers fall behind, the engine waits.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks import digest
from tasks.extract.assemble import Sample
from tasks.vocabulary import DType, Receipt, digest_ids

#: Stage one sample: (directory, key, what the stage needs to know of the store, states [L, T, H] as uint16 bits or
#: float32, ids [T]) -> {path: (bytes, crc32c)}
Stage = Callable[[Path, str, Mapping[str, Any], npt.NDArray[Any], npt.NDArray[np.int32]], Mapping[str, tuple[int, int]]]


class ByteBudget:
    """Bounds the host memory of captured samples; blocks the capture while the writers hold too much."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waited = 0.0
        """Seconds that the capture has waited for the writers."""
        self._held = 0
        self._writing = 0
        self._changed = threading.Condition()

    def reserve(self, num_bytes: int) -> None:
        """Wait until there is room. Never waits while no sample is being written, since none could make room."""
        with self._changed:
            if self._held + num_bytes > self.limit and self._writing:
                began = perf_counter()
                self._changed.wait_for(lambda: self._held + num_bytes <= self.limit or not self._writing)
                self.waited += perf_counter() - began
            self._held += num_bytes

    def writing(self) -> None:
        """A sample was handed to the writers."""
        with self._changed:
            self._writing += 1

    def release(self, num_bytes: int, *, written: bool) -> None:
        """A sample's memory is free again, after it was ``written`` or when it was abandoned."""
        with self._changed:
            self._held -= num_bytes
            self._writing -= written
            self._changed.notify_all()


class Writer:
    """Encodes and stages samples in threads, and keeps their receipts until they are collected."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        dtype: DType,
        stage: Stage,
        stage_spec: Mapping[str, Any],
        threads: int,
        limit_bytes: int,
    ) -> None:
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self._stage, self._stage_spec = stage, stage_spec
        self.budget = ByteBudget(limit_bytes)
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="layertap-writer")
        self._receipts: dict[str, Future[Receipt]] = {}

    def submit(self, sample: Sample) -> None:
        """Take a complete sample; staged only where this rank keeps the states."""
        if sample.states_LTH is not None:
            self.budget.writing()
        self._receipts[sample.key] = self._pool.submit(self._write, sample)

    def abandon(self, sample: Sample) -> None:
        """Write the receipt of a sample that will not be completed."""
        if sample.states_LTH is not None:
            self.budget.release(sample.states_LTH.nbytes, written=False)
        error = sample.error or f"only rows [0, {sample.filled}) of {sample.num_tokens} were computed"
        done: Future[Receipt] = Future()
        done.set_result(self._receipt(sample, error=error))
        self._receipts[sample.key] = done

    def ready(self, key: str) -> bool:
        """Whether the receipt of this sample can be collected."""
        return key in self._receipts and self._receipts[key].done()

    def receipt(self, key: str) -> Receipt:
        return self._receipts[key].result()

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._receipts[key]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, sample: Sample) -> Receipt:
        states_LTH = sample.states_LTH
        if states_LTH is None:
            return self._receipt(sample)
        try:
            arrived = [
                digest.sample_digest(digest.row_digests(states_LTH[depth]).numpy())
                for depth in range(states_LTH.shape[0])
            ]
            bits = states_LTH.view(torch.uint16) if states_LTH.dtype == torch.bfloat16 else states_LTH
            objects = self._stage(sample.directory, sample.key, self._stage_spec, bits.numpy(), sample.input_ids_T)
            return self._receipt(sample, objects=objects, arrived=arrived)
        except Exception as error:  # any fault of one sample is that sample's verdict, not the engine's end
            return self._receipt(sample, error=f"{type(error).__name__}: {error}")
        finally:
            self.budget.release(states_LTH.nbytes, written=True)

    def _receipt(
        self,
        sample: Sample,
        *,
        objects: Mapping[str, tuple[int, int]] | None = None,
        arrived: list[str] | None = None,
        error: str | None = None,
    ) -> Receipt:
        num_tokens, num_depths = sample.digests_TL.shape
        hidden_size = sample.hidden_size
        return Receipt(
            key=sample.key,
            rank=self._rank,
            world_size=self._world_size,
            shape=(num_depths, sample.filled, hidden_size),
            dtype=self._dtype,
            ids_digest=digest_ids(sample.input_ids_T),
            digests=tuple(digest.sample_digest(sample.digests_TL[:, d]) for d in range(num_depths)),
            staged_digests=None if arrived is None else tuple(arrived),
            rms=tuple(float(x) for x in np.sqrt(sample.squares_TL.sum(axis=0) / (num_tokens * hidden_size))),
            nonfinite=tuple(int(x) for x in sample.nonfinite_TL.sum(axis=0)),
            zero_rows=tuple(int(x) for x in sample.zero_TL.sum(axis=0)),
            objects=objects,
            error=error,
        )
