"""What becomes of rows in host memory: whole samples, staged files, receipts."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract.assemble import Arrived, Assembler, Sample
from tasks.extract.copies import Copies
from tasks.extract.prefix_rows import PrefixRows
from tasks.extract.receipts import Outbox
from tasks.extract.step import Span
from tasks.extract.writer import Writer
from tasks.prefixes import NAME_BYTES
from tasks.vocabulary import DType, Receipt

#: A request's rows of a step, and where its states stand in what is delivered; None if this rank does not keep them.
Place = tuple[Span, slice | None]


class Wanted(NamedTuple):
    """A sample that the engine was asked for."""

    key: str
    num_tokens: int
    directory: str
    """To stage it in."""
    writer: int
    """The rank that does so; every rank holds its states, and digests them."""
    shared: int = 0
    """Tokens with which other samples may begin, too."""
    prefix: bytes = b""
    """Names of the whole blocks in them (see :func:`tasks.prefixes.prefix_names`), one behind the other."""

    @property
    def num_blocks(self) -> int:
        return len(self.prefix) // NAME_BYTES

    @property
    def names(self) -> list[bytes]:
        return [self.prefix[i : i + NAME_BYTES] for i in range(0, len(self.prefix), NAME_BYTES)]


@dataclass(frozen=True)
class CaptureSettings:
    """What a rank's capture needs to know beside the engine's own configuration; plain values."""

    stage: str
    """The function that stages a sample, as ``package.module:function``."""
    stage_spec: dict[str, Any]
    """What it needs to know of the store."""
    receipts: str
    """Address of :class:`tasks.extract.receipts.Inbox`."""
    writer_threads: int
    """Of this rank."""
    staging_bytes: int
    """Bound on a rank's host memory for captured samples; the same on all ranks."""
    ring_slots: int
    """Buffers between the device and the process that writes."""
    deal: bool
    """Whether samples are dealt over the ranks to be written, or all written by the first."""
    writer_process: bool | None
    """Whether samples are assembled and written in a process of their own; on a GPU always."""
    reuse_bytes: int
    """Bound on this rank's host memory for rows of shared prefixes; 0 if none are reused."""


@dataclass(frozen=True)
class AssemblySpec:
    """What one rank's assembly needs to know; plain values, since it may be sent to another process."""

    rank: int
    world_size: int
    num_depths: int
    hidden_size: int
    dtype: DType
    witnessed: bool
    """Whether rows are compared with what the layers themselves were given."""
    block: int
    """Tokens of a block of the engine's KV cache."""
    settings: CaptureSettings

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def row_bytes(self) -> int:
        """Of one token at one depth."""
        return self.hidden_size * self.torch_dtype.itemsize

    @property
    def keeps_any(self) -> bool:
        return self.settings.deal or self.rank == 0


class Assembly:
    """Assembles samples from the rows of engine steps, and writes them; safe to call from any thread."""

    def __init__(self, spec: AssemblySpec) -> None:
        self._rank = spec.rank
        self._assembling = self._assembling_ran = 0.0
        self._lock = threading.Lock()
        self.outbox = Outbox(spec.settings.receipts, spec.rank)
        self._owed_lock = threading.Lock()
        self._owed: set[str] = set()
        """Samples that are complete and have no receipt yet."""
        self._settling: list[tuple[int, set[str]]] = []
        """Number of the question, and the samples among those to be settled that are owed a receipt."""
        # Half as many as encode: the engine waits for copies, but not for encoding, as long as there is memory.
        self._copies = Copies(max(1, min(8, spec.settings.writer_threads // 2)))
        self._prefixes = None
        if spec.settings.reuse_bytes:
            self._prefixes = PrefixRows(
                block=spec.block,
                num_depths=spec.num_depths,
                hidden_size=spec.hidden_size,
                dtype=spec.torch_dtype,
                limit_bytes=spec.settings.reuse_bytes,
                holds_states=spec.keeps_any,
                copies=self._copies,
            )
        self.writer = Writer(
            rank=spec.rank,
            world_size=spec.world_size,
            dtype=spec.dtype,
            stage=spec.settings.stage,
            stage_spec=spec.settings.stage_spec,
            threads=spec.settings.writer_threads,
            limit_bytes=spec.settings.staging_bytes,
            witnessed=spec.witnessed,
            on_receipt=self._pay,
            staged=None if self._prefixes is None else self._prefixes.staged,
        )
        self.assembler = Assembler(
            num_depths=spec.num_depths,
            hidden_size=spec.hidden_size,
            dtype=spec.torch_dtype,
            on_complete=self._write,
            take=self.writer.memory.take,
            give_back=lambda buffer: self.writer.memory.give_back(buffer, written=False),
            on_lost=self.writer.abandon,
            prefixes=self._prefixes,
            copies=self._copies,
            # A quarter of the memory: the rest is with the writers meanwhile.
            step_tokens=spec.settings.staging_bytes // (4 * spec.num_depths * spec.row_bytes),
        )

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Announce samples, before their rows come."""
        with self._lock:
            for sample in wanted:
                self.assembler.expect(
                    sample.key,
                    sample.num_tokens,
                    Path(sample.directory),
                    keeps=sample.writer == self._rank,
                    prefix=sample.names,
                    shared=sample.shared,
                )

    def forget_prefixes(self) -> None:
        """Let go of all rows that are held for other samples."""
        with self._lock:
            if self._prefixes is not None:
                self._prefixes.clear()

    def deliver(self, places: Sequence[Place], arrived: Arrived) -> None:
        """Take the rows of one step, by its requests."""
        began, ran = perf_counter(), thread_time()
        with self._lock:
            for span, state_rows in places:
                self.assembler.add(span.key, span.start, arrived, span.rows, state_rows)
            self.assembler.settle()
        self._assembling += perf_counter() - began
        self._assembling_ran += thread_time() - ran

    def refuse(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        """Give up a sample whose states have the wrong shape or element type."""
        with self._lock:
            self.assembler.refuse(key, shape, dtype)

    def settle(self, question: int, keys: Sequence[str]) -> None:
        """No more rows of these samples will come: see that each has its receipt, and say when that is so."""
        with self._lock:
            for key in keys:
                unfinished = self.assembler.forget(key)
                if unfinished is not None:
                    self.writer.abandon(unfinished)
            with self._owed_lock:
                self._settling.append((question, self._owed.intersection(keys)))
                self._say_settled()

    def _write(self, sample: Sample) -> None:
        with self._owed_lock:
            self._owed.add(sample.key)
        self.writer.submit(sample)

    def _pay(self, receipt: Receipt, digests_TL: npt.NDArray[np.int64]) -> None:
        self.outbox.receipt(receipt, digests_TL)
        with self._owed_lock:
            self._owed.discard(receipt.key)
            for _, owed in self._settling:
                owed.discard(receipt.key)
            self._say_settled()

    def _say_settled(self) -> None:
        for question, owed in self._settling:
            if not owed:
                self.outbox.settled(question)
        self._settling = [(question, owed) for question, owed in self._settling if owed]

    def report(self) -> dict[str, float]:
        """Seconds that the capture has waited for the writers, and that their threads have spent, by what on.

        And those that the assembly of steps has taken, with its waits, and the processor time of its own thread within.
        """
        spent = {f"writers_{what}": seconds for what, seconds in self.writer.seconds.items()}
        assembling = {"assembling": self._assembling, "assembling_ran": self._assembling_ran}
        return {"waited_for_writers": self.writer.memory.waited, **assembling, **spent}

    def close(self) -> dict[str, float]:
        """Stop writing; what waits to be written is dropped. Returns the report."""
        self._copies.close()
        self.writer.close()
        self.outbox.close()
        return self.report()
