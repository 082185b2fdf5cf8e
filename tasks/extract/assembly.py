"""What becomes of rows in host memory: whole samples, staged files, receipts."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract.assemble import Assembler, RowSummary, Sample
from tasks.extract.receipts import Outbox
from tasks.extract.step import Span
from tasks.extract.writer import Writer
from tasks.vocabulary import DType, Receipt

#: A request's rows of a step, and where its states stand in what is delivered; None if this rank does not keep them.
Place = tuple[Span, slice | None]


class Wanted(NamedTuple):
    """A sample that the engine was asked for."""

    key: str
    num_tokens: int
    directory: str
    """To stage it in."""


@dataclass(frozen=True)
class AssemblySpec:
    """What one rank's assembly needs to know; plain values, since it may be sent to another process."""

    rank: int
    world_size: int
    num_depths: int
    hidden_size: int
    dtype: DType
    receipts: str
    """Address of :class:`tasks.extract.receipts.Inbox`."""
    deal: bool
    """Whether samples are dealt over the ranks to be written, or all written by the first."""
    stage: str
    """The function that stages a sample, as ``package.module:function`` (see :data:`tasks.extract.writer.Stage`)."""
    stage_spec: Mapping[str, Any]
    writer_threads: int
    staging_bytes: int
    """Bound on host memory for captured samples."""
    witnessed: bool
    """Whether rows are compared with what the layers themselves were given."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def keeps(self, key: str) -> bool:
        """Whether this rank keeps a sample's states; every rank holds them all, and digests them."""
        return (int(key[:8], 16) % self.world_size if self.deal else 0) == self.rank

    @property
    def keeps_any(self) -> bool:
        return self.deal or self.rank == 0


class Assembly:
    """Assembles samples from the rows of engine steps, and writes them; safe to call from any thread."""

    def __init__(self, spec: AssemblySpec) -> None:
        self._lock = threading.Lock()
        self.outbox = Outbox(spec.receipts, spec.rank)
        self._owed_lock = threading.Lock()
        self._owed: set[str] = set()
        """Samples that are complete and have no receipt yet."""
        self._settling: list[tuple[str, set[str]]] = []
        """First key of samples to be settled, and those among them that are owed a receipt."""
        self.writer = Writer(
            rank=spec.rank,
            world_size=spec.world_size,
            dtype=spec.dtype,
            stage=spec.stage,
            stage_spec=spec.stage_spec,
            threads=spec.writer_threads,
            limit_bytes=spec.staging_bytes,
            witnessed=spec.witnessed,
            on_receipt=self._pay,
        )
        self.assembler = Assembler(
            num_depths=spec.num_depths,
            hidden_size=spec.hidden_size,
            dtype=spec.torch_dtype,
            keeps=spec.keeps,
            on_complete=self._write,
            take=self.writer.memory.take,
        )

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Announce samples, before their rows come."""
        with self._lock:
            for key, num_tokens, directory in wanted:
                self.assembler.expect(key, num_tokens, Path(directory))

    def deliver(self, places: Sequence[Place], states: Sequence[torch.Tensor], summary: RowSummary) -> None:
        """Take the rows of one step: its requests, the states per depth [N, H], and the summary of all its rows."""
        with self._lock:
            for span, state_rows in places:
                self.assembler.add(span.key, span.start, states, summary, span.rows, state_rows)

    def refuse(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        """Give up a sample whose states have the wrong shape or element type."""
        with self._lock:
            self.assembler.refuse(key, shape, dtype)

    def settle(self, keys: Sequence[str]) -> None:
        """No more rows of these samples will come: see that each has its receipt, and say when that is so."""
        with self._lock:
            for key in keys:
                unfinished = self.assembler.forget(key)
                if unfinished is not None:
                    self.writer.abandon(unfinished)
            with self._owed_lock:
                self._settling.append((keys[0], self._owed.intersection(keys)))
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
        for first_key, owed in self._settling:
            if not owed:
                self.outbox.settled(first_key)
        self._settling = [(first_key, owed) for first_key, owed in self._settling if owed]

    def report(self) -> dict[str, float]:
        """Seconds that the capture has waited for the writers, and that their threads have spent, by what on."""
        spent = {f"writers_{what}": seconds for what, seconds in self.writer.seconds.items()}
        return {"waited_for_writers": self.writer.memory.waited, **spent}

    def close(self) -> dict[str, float]:
        """Stop writing; what waits to be written is dropped. Returns the report."""
        self.writer.close()
        self.outbox.close()
        return self.report()
