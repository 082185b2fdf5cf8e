"""Writer threads: a complete sample in host memory becomes staged files and a receipt.

Tensors never pass through a queue between processes. Memory is bounded; when the writers fall behind, the engine
waits. A long sample's chunks are encoded side by side, so that the last sample of a run is not one thread's work.
"""

import pkgutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
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
from tasks.extract.staged_rows import PromiseBroken, StagedPrefixes, uncovered
from tasks.profile import profile_of
from tasks.vocabulary import ChunkGone, DType, Receipt, SharedChunk, Sharing, StagingFailure, digest_ids

#: Stage one sample: (directory, key, what the stage needs to know of the store, states [L, T, H] as uint16 bits or
#: float32, ids [T], threads for its chunks) -> {path: (bytes, crc32c)}
Stage = Callable[
    [Path, str, Mapping[str, Any], npt.NDArray[Any], npt.NDArray[np.int32], Executor], Mapping[str, tuple[int, int]]
]

_DIGEST_ROWS = 512  # of all depths, digested by one thread


class Writer:
    """Encodes and stages samples in threads, and gives a receipt for each."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        dtype: DType,
        stage: str,
        stage_spec: Mapping[str, Any],
        threads: int,
        limit_bytes: int,
        on_receipt: Callable[[Receipt, npt.NDArray[np.int64]], None],
        witnessed: bool = False,
        staged: StagedPrefixes | None = None,
    ) -> None:
        self._witnessed = witnessed
        self._rank, self._world_size, self._dtype = rank, world_size, dtype
        self._stage: Stage = pkgutil.resolve_name(stage)
        self._stage_spec = stage_spec
        self._on_receipt = on_receipt
        self._staged = staged
        """Learns what samples need not bring again."""
        self.memory = HostMemory(limit_bytes)
        self.seconds = {"digest": 0.0, "stage": 0.0, "waited": 0.0}
        """From beginning to end of each, added up over samples; staging with the wait for what others stage."""
        self._samples = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="layertap-writer")
        self._chunks = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="layertap-encoder")

    def submit(self, sample: Sample) -> None:
        """Take a complete sample; staged only where this rank keeps the states."""
        if sample.buffer is not None:
            self.memory.writing()
        self._samples.submit(self._write, sample)

    def abandon(self, sample: Sample) -> None:
        """Give the receipt of a sample that will not be completed."""
        if sample.buffer is not None:
            self.memory.give_back(sample.buffer, written=False)
        error = sample.error
        if error is None and sample.misshapen is None:
            error = f"only rows [0, {sample.filled}) of {sample.num_tokens} were computed"
        if sample.gaps:
            error = f"rows {sample.gaps} came from the engine's cache, and are no longer held here"
        receipt = replace(self._receipt(sample, error=error), rows_gone=bool(sample.gaps))
        self._on_receipt(receipt, sample.facts.digests_NL)

    def close(self) -> None:
        self._samples.shutdown(wait=True, cancel_futures=True)
        self._chunks.shutdown(wait=True, cancel_futures=True)

    def _write(self, sample: Sample) -> None:
        self._on_receipt(self._written(sample), sample.facts.digests_NL)

    def _written(self, sample: Sample) -> Receipt:
        bytes_LTB, buffer = sample.bytes_LTB, sample.buffer
        if bytes_LTB is None or buffer is None:
            return self._receipt(sample)
        try:
            began = perf_counter()
            arrived_TL = self._digests_on_arrival(sample, bytes_LTB.view(np.int16))
            digested = perf_counter()
            bits_LTH = bytes_LTB.view(np.uint16 if sample.dtype == torch.bfloat16 else np.float32)

            def linked() -> Mapping[str, SharedChunk]:
                if self._staged is not None:
                    digests_TL = sample.facts.digests_NL
                    self._staged.learn(sample.prefix, sample.promised, sharing.chunks, digests_TL, arrived_TL)
                return self._linked(sample, arrived_TL)

            sharing = Sharing(sample.shared, [(rows.start, rows.stop) for rows in sample.staged], linked)
            spec, ids_T = {**self._stage_spec, "sharing": sharing}, sample.facts.input_ids_N
            objects = self._stage(sample.directory, sample.key, spec, bits_LTH, ids_T, self._chunks)
            self.seconds["digest"] += digested - began
            self.seconds["stage"] += perf_counter() - digested
            changed_TL, unwritten_TL = _changes(sample, arrived_TL)
            return replace(
                self._receipt(sample, objects=objects),
                staged_digests=_digests(arrived_TL),
                last_row=bits_LTH[-1, -1].tobytes(),
                profile=profile_of(np.sqrt(sample.facts.squares_NL / sample.hidden_size)),
                changed_rows=_counts(changed_TL),
                unwritten_rows=_counts(unwritten_TL),
            )
        except ChunkGone as error:
            if self._staged is not None and not isinstance(error, PromiseBroken):
                self._staged.clear()  # other links may be gone, too
            return replace(self._receipt(sample, error=str(error)), rows_gone=True)
        except StagingFailure as error:
            return replace(
                self._receipt(sample, error=str(error)), storage_failed="lasting" if error.lasting else "passing"
            )
        except Exception as error:  # any fault of one sample is that sample's verdict, not the engine's end
            return self._receipt(sample, error=f"{type(error).__name__}: {error}")
        finally:
            for rows in sample.promised:
                rows.settle(None)  # unless it was staged
            self.memory.give_back(buffer, written=True)

    def _linked(self, sample: Sample, arrived_TL: npt.NDArray[np.int64]) -> Mapping[str, SharedChunk]:
        """Chunks by path that others have staged for a sample, with the digests of their rows filled in.

        Waits for samples that were handed over before this one: none waits for one in the queue behind it. What this
        one stages itself is known by now, so that those with ever longer prefixes do not wait for each other in a row.
        """
        began = perf_counter()
        chunks: dict[str, SharedChunk] = {}
        for rows in sample.staged:
            files = rows.files()
            arrived_TL[rows.start : rows.stop] = files.arrived_TL
            chunks |= files.chunks
        self.seconds["waited"] += perf_counter() - began
        return chunks

    def _digests_on_arrival(self, sample: Sample, bits_LTW: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
        """Digests of each row as it stands in host memory, but for those that others stage; int64 [T, L]."""
        num_depths, num_tokens = bits_LTW.shape[:2]
        arrived_TL = np.empty((num_tokens, num_depths), np.int64)
        blocks = [
            (start, min(start + _DIGEST_ROWS, stop))
            for first, stop in uncovered(sample.staged, 0, num_tokens)
            for start in range(first, stop, _DIGEST_ROWS)
        ]

        def digest_block(block: tuple[int, int]) -> None:
            start, stop = block
            for depth in range(num_depths):
                arrived_TL[start:stop, depth] = digest.bit_digests(bits_LTW[depth, start:stop])

        run = self._chunks.map if len(blocks) > 1 else map
        for _ in run(digest_block, blocks):
            pass
        return arrived_TL

    def _receipt(
        self, sample: Sample, *, objects: Mapping[str, tuple[int, int]] | None = None, error: str | None = None
    ) -> Receipt:
        facts = sample.facts
        num_depths = facts.digests_NL.shape[1]
        shape, dtype = sample.misshapen or ((num_depths, sample.filled, sample.hidden_size), self._dtype)
        row_squares_TL = facts.squares_NL / sample.hidden_size
        with np.errstate(invalid="ignore"):  # a model that computes NaN is told by other figures
            rms = tuple(float(x) for x in np.sqrt(row_squares_TL.mean(axis=0)))
            median_rms = tuple(float(x) for x in np.sqrt(np.median(row_squares_TL, axis=0)))
        # Once a row is NaN or infinite, every deeper state of it is: the stream only ever adds.
        healed_TL = bad_TL = facts.nonfinite_NL > 0
        if bad_TL.any():
            healed_TL = bad_TL & ~np.minimum.accumulate(bad_TL[:, ::-1], axis=1)[:, ::-1]
        carried_TL = facts.digests_NL[:, 1:] == facts.digests_NL[:, :-1]
        return Receipt(
            key=sample.key,
            rank=self._rank,
            world_size=self._world_size,
            shape=shape,
            dtype=dtype,
            ids_digest=digest_ids(facts.input_ids_N),
            digests=_digests(facts.digests_NL),
            rms=rms,
            nonfinite=_counts(facts.nonfinite_NL),
            zero_rows=_counts(facts.zero_NL),
            objects=objects,
            error=error,
            unlike_rows=_counts(facts.unlike_NL) if self._witnessed else None,
            healed_rows=_counts(healed_TL),
            repeated_rows=tuple(
                digest.repeated_rows(facts.digests_NL[:, d], facts.input_ids_N) for d in range(num_depths)
            ),
            carried_rows=(0, *_counts(carried_TL)),
            median_rms=median_rms,
            reused=_sources(sample),
        )


def _sources(sample: Sample) -> tuple[tuple[str, int], ...]:
    """Key of another sample, and how many rows were computed for it."""
    rows: dict[str, int] = {}
    for start, stop, source in sample.reused:
        rows[source] = rows.get(source, 0) + stop - start
    return tuple(rows.items())


def _counts(rows_TL: npt.NDArray[Any]) -> tuple[int, ...]:
    if not rows_TL.any():  # as it mostly is, and told in a tenth of the time
        return tuple([0] * rows_TL.shape[1])
    return tuple(int(n) for n in rows_TL.sum(axis=0))


def _digests(digests_TL: npt.NDArray[np.int64]) -> tuple[str, ...]:
    return tuple(digest.sample_digest(digests_T) for digests_T in digests_TL.T)


def _changes(sample: Sample, arrived_TL: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Rows that arrived with other bits than the device had, and those of them that hold poison; bool [T, L]."""
    changed_TL = arrived_TL != sample.facts.digests_NL
    unwritten_TL = np.zeros_like(changed_TL)
    if changed_TL.any() and (states_LTH := sample.states_LTH) is not None:
        poisoned_LT = torch.isnan(states_LTH[:, :, :POISONED_COLUMNS]).all(dim=2)
        unwritten_TL = changed_TL & poisoned_LT.numpy().T
    return changed_TL, unwritten_TL
