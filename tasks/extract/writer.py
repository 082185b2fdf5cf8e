"""Writer threads: a complete sample in host memory becomes staged files and a receipt.

The threads run in the engine's worker process, beside the engine: tensors never pass through a queue between
processes. Memory is bounded; when the writers fall behind, the engine waits.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks import digest
from tasks.extract.assemble import POISONED_COLUMNS, Sample
from tasks.extract.memory import HostMemory
from tasks.profile import profile_of
from tasks.vocabulary import DType, Receipt, StagingFailure, digest_ids

#: Stage one sample: (directory, key, what the stage needs to know of the store, states [L, T, H] as uint16 bits or
#: float32, ids [T]) -> {path: (bytes, crc32c)}
Stage = Callable[[Path, str, Mapping[str, Any], npt.NDArray[Any], npt.NDArray[np.int32]], Mapping[str, tuple[int, int]]]


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
        witnessed: bool = False,
    ) -> None:
        self._witnessed = witnessed
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self._stage, self._stage_spec = stage, stage_spec
        self.memory = HostMemory(limit_bytes)
        self.seconds = {"digest": 0.0, "stage": 0.0}
        """Where the threads' time went, summed over them."""
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="layertap-writer")
        self._receipts: dict[str, Future[Receipt]] = {}
        self._row_digests: dict[str, npt.NDArray[np.int64]] = {}

    def submit(self, sample: Sample) -> None:
        """Take a complete sample; staged only where this rank keeps the states."""
        if sample.buffer is not None:
            self.memory.writing()
        self._receipts[sample.key] = self._pool.submit(self._write, sample)

    def abandon(self, sample: Sample) -> None:
        """Write the receipt of a sample that will not be completed."""
        if sample.buffer is not None:
            self.memory.give_back(sample.buffer, written=False)
        error = sample.error
        if error is None and sample.misshapen is None:
            error = f"only rows [0, {sample.filled}) of {sample.num_tokens} were computed"
        done: Future[Receipt] = Future()
        done.set_result(self._receipt(sample, error=error))
        self._receipts[sample.key] = done

    def ready(self, key: str) -> bool:
        """Whether the receipt of this sample can be collected."""
        return key in self._receipts and self._receipts[key].done()

    def receipt(self, key: str) -> Receipt:
        return self._receipts[key].result()

    def row_digests(self, key: str) -> bytes:
        """Digests of every row of a sample whose receipt was not forgotten yet: int64 [T, L], little-endian."""
        return self._row_digests[key].astype("<i8").tobytes()

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self._receipts[key], self._row_digests[key]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, sample: Sample) -> Receipt:
        states_LTH, buffer = sample.states_LTH, sample.buffer
        if states_LTH is None or buffer is None:
            return self._receipt(sample)
        began = perf_counter()
        try:
            arrived_TL = np.stack([digest.row_digests(rows_TH).numpy() for rows_TH in states_LTH], axis=1)
            digested = perf_counter()
            bits = states_LTH.view(torch.uint16) if states_LTH.dtype == torch.bfloat16 else states_LTH
            objects = self._stage(sample.directory, sample.key, self._stage_spec, bits.numpy(), sample.input_ids_T)
            self.seconds["digest"] += digested - began
            self.seconds["stage"] += perf_counter() - digested
            changed_TL, unwritten_TL = _changes(sample, states_LTH, arrived_TL)
            return replace(
                self._receipt(sample, objects=objects),
                staged_digests=_digests(arrived_TL),
                last_row=bits[-1, -1].numpy().tobytes(),
                profile=profile_of(np.sqrt(sample.squares_TL / sample.hidden_size)),
                changed_rows=_counts(changed_TL),
                unwritten_rows=_counts(unwritten_TL),
            )
        except StagingFailure as error:
            return replace(
                self._receipt(sample, error=str(error)), storage_failed="lasting" if error.lasting else "passing"
            )
        except Exception as error:  # any fault of one sample is that sample's verdict, not the engine's end
            return self._receipt(sample, error=f"{type(error).__name__}: {error}")
        finally:
            self.memory.give_back(buffer, written=True)

    def _receipt(
        self, sample: Sample, *, objects: Mapping[str, tuple[int, int]] | None = None, error: str | None = None
    ) -> Receipt:
        self._row_digests[sample.key] = sample.digests_TL
        num_depths = sample.digests_TL.shape[1]
        shape, dtype = sample.misshapen or ((num_depths, sample.filled, sample.hidden_size), self._dtype)
        row_squares_TL = sample.squares_TL / sample.hidden_size
        with np.errstate(invalid="ignore"):  # a model that computes NaN is told by other figures
            rms = tuple(float(x) for x in np.sqrt(row_squares_TL.mean(axis=0)))
            median_rms = tuple(float(x) for x in np.sqrt(np.median(row_squares_TL, axis=0)))
        bad_TL = sample.nonfinite_TL > 0
        # Once a row is NaN or infinite, every deeper state of it is: the stream only ever adds.
        healed_TL = bad_TL & ~np.minimum.accumulate(bad_TL[:, ::-1], axis=1)[:, ::-1]
        carried_TL = sample.digests_TL[:, 1:] == sample.digests_TL[:, :-1]
        return Receipt(
            key=sample.key,
            rank=self._rank,
            world_size=self._world_size,
            shape=shape,
            dtype=dtype,
            ids_digest=digest_ids(sample.input_ids_T),
            digests=_digests(sample.digests_TL),
            rms=rms,
            nonfinite=_counts(sample.nonfinite_TL),
            zero_rows=_counts(sample.zero_TL),
            objects=objects,
            error=error,
            unlike_rows=_counts(sample.unlike_TL) if self._witnessed else None,
            healed_rows=_counts(healed_TL),
            repeated_rows=tuple(
                digest.repeated_rows(sample.digests_TL[:, d], sample.input_ids_T) for d in range(num_depths)
            ),
            carried_rows=(0, *_counts(carried_TL)),
            median_rms=median_rms,
        )


def _counts(rows_TL: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in rows_TL.sum(axis=0))


def _digests(digests_TL: npt.NDArray[np.int64]) -> tuple[str, ...]:
    return tuple(digest.sample_digest(digests_T) for digests_T in digests_TL.T)


def _changes(
    sample: Sample, states_LTH: torch.Tensor, arrived_TL: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Rows that arrived with other bits than the device had, and those of them that never arrived; bool [T, L]."""
    changed_TL = arrived_TL != sample.digests_TL
    unwritten_TL = np.zeros_like(changed_TL)
    for token, depth in np.argwhere(changed_TL):
        unwritten_TL[token, depth] = bool(torch.isnan(states_LTH[depth, token, :POISONED_COLUMNS]).all())
    return changed_TL, unwritten_TL
