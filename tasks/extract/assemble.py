"""Rows of engine steps become whole samples in host memory.

A prompt longer than one step arrives in several pieces (chunked prefill), a preempted one arrives again from an
earlier position, and rows the engine did not compute, since it has their keys and values, leave a gap. The gap is
filled with the rows that were computed for another sample with the same prefix (:mod:`tasks.extract.prefix_rows`). A
sample is handed on only when its rows cover [0, T) without a gap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tasks import digest
from tasks.extract.copies import Copies, Copy
from tasks.extract.prefix_rows import Holding, PrefixRows, Reused
from tasks.extract.row_facts import RowFacts
from tasks.extract.staged_rows import StagedRows, uncovered
from tasks.extract.witness import unlike_rows

#: Poison: a row that is to be written has NaN in its first columns until it is, where it could hold plausible zeros or
#: another sample's states. Filling whole rows would cost as much as writing them. Rows that will not be written, since
#: a staged file has them, are not touched: the system would have to find memory for them.
POISONED_COLUMNS = 8
_NAN_BYTE = 0xFF  # all bits set are NaN in every type of float


@dataclass(frozen=True)
class RowSummary:
    """Per row and depth, what the device says of the states before they travel: the proof of what arrived."""

    digests_NL: torch.Tensor
    """int64 [N, L], see :func:`tasks.digest.row_digests`."""
    squares_NL: torch.Tensor
    """float64 [N, L], sum of squares over the hidden axis."""
    nonfinite_NL: torch.Tensor
    """int32 [N, L], elements that are NaN or infinite."""
    zero_NL: torch.Tensor
    """bool [N, L], rows that are all zero."""
    unlike_NL: torch.Tensor
    """bool [N, L], rows that differ from what the layer was itself given (see :mod:`tasks.extract.witness`)."""
    input_ids_N: torch.Tensor
    """int32 [N], what the model was fed."""


def summarize(
    states: Sequence[torch.Tensor], input_ids: torch.Tensor, witness: Sequence[torch.Tensor] | None = None
) -> RowSummary:
    """Summarize the rows of one step on the device that computed them.

    Args:
        states: per depth [N, H].
        input_ids: [N]
        witness: per depth [N, C], the columns that :class:`tasks.extract.witness.Witness` saw; None if not watched.
    """
    examined = [_examine(rows_NH) for rows_NH in states]
    digests, squares, nonfinite, zero = (torch.stack(column, 1) for column in zip(*examined, strict=True))
    if witness is None:
        unlike = torch.zeros_like(zero)
    else:
        unlike = torch.stack([unlike_rows(rows, seen) for rows, seen in zip(states, witness, strict=True)], 1)
    return RowSummary(digests, squares, nonfinite, zero, unlike, input_ids.to(torch.int32))


def _examine(rows_NH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Digest, sum of squares, elements not finite and all-zero of each row, each [N]."""
    if rows_NH.is_cuda:
        from tasks.extract.row_kernel import examine_rows

        return examine_rows(
            rows_NH, digest.column_weights(rows_NH.shape[1] * rows_NH.element_size() // 2, rows_NH.device)
        )
    digests_N, values = digest.row_digests(rows_NH), rows_NH.float()
    squares_N = (values * values).sum(dim=1, dtype=torch.float64)
    nonfinite_N = torch.zeros_like(squares_N, dtype=torch.int32)
    zero_N = torch.zeros_like(squares_N, dtype=torch.bool)
    if not ((squares_N > 0) & (squares_N < torch.inf)).all():  # seldom; to look again takes twice as long as all else
        nonfinite_N = (~torch.isfinite(values)).sum(dim=1, dtype=torch.int32)
        zero_N = ~(values != 0).any(dim=1)
    return digests_N, squares_N, nonfinite_N, zero_N


class Arrived(NamedTuple):
    """The rows of one step in host memory.

    Arrays, since a slice of a tensor gives up the interpreter's lock, for which some dozen threads wait that encode.
    """

    states: npt.NDArray[np.uint8] | Sequence[npt.NDArray[np.uint8]]
    """[L, N, B], or per depth [N, B], bytes; maybe of fewer rows than the summary has, where this rank does not keep
    all."""
    facts: RowFacts

    @classmethod
    def of(cls, states: Iterable[torch.Tensor], summary: RowSummary) -> "Arrived":
        """States per depth [N, H] and the summary of the step's rows, both in host memory."""
        rows = [rows_NH.contiguous().view(torch.uint8).numpy() for rows_NH in states]
        return cls(rows, RowFacts(**{name: column.contiguous().numpy() for name, column in vars(summary).items()}))


@dataclass
class Sample:
    """A sample being assembled on one rank."""

    key: str
    num_tokens: int
    hidden_size: int
    directory: Path
    keeps: bool
    """Whether this rank writes its states, or only digests them."""
    dtype: torch.dtype
    bytes_LTB: npt.NDArray[np.uint8] | None
    """Of the states; None where nobody needs them, and of its prefix only where only others do."""
    buffer: npt.NDArray[np.uint8] | None
    """The memory under them, to be given back."""
    facts: RowFacts
    """Of rows [0, num_tokens)."""
    prefix: Sequence[bytes] = ()
    """Names of its first blocks, which other samples may begin with, too (see :func:`tasks.prefixes.prefix_names`)."""
    shared: int = 0
    """Up to this many tokens, others may begin alike."""
    filled: int = 0
    """Rows [0, filled) are there, but for the gaps."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Rows [start, stop) that the engine has not computed for this sample."""
    reused: list[Reused] = field(default_factory=list)
    """Rows that were computed for other samples."""
    staged: list[StagedRows] = field(default_factory=list)
    """Of these, rows that are in staged files, or will be; ``bytes_LTB`` does not have them. In order."""
    promised: list[StagedRows] = field(default_factory=list)
    """Rows that others count on this sample to stage."""
    whole_from: int = 0
    """Rows [whole_from, filled) came without a gap between them."""
    error: str | None = None
    misshapen: tuple[tuple[int, ...], str] | None = None
    """Shape [L, rows, ...] and element type of what was computed, where it is not what was asked for."""

    @property
    def states_LTH(self) -> torch.Tensor | None:
        """The states, in the same memory."""
        return None if self.bytes_LTB is None else torch.from_numpy(self.bytes_LTB).view(self.dtype)

    @property
    def complete(self) -> bool:
        return self.filled == self.num_tokens


class _Expected(NamedTuple):
    num_tokens: int
    directory: Path
    keeps: bool
    prefix: Sequence[bytes]
    shared: int


class _Placed(NamedTuple):
    """Rows [start, stop) of a sample."""

    sample: Sample
    start: int
    stop: int
    copies: list[Copy]


@dataclass
class Assembler:
    """Places the rows of each step into the samples that are expected, and hands on those that are complete.

    States are copied for all requests of a step together: each wait for the copying threads costs as much as some
    hundred rows.
    """

    num_depths: int
    hidden_size: int
    dtype: torch.dtype
    on_complete: Callable[[Sample], None]
    take: Callable[[int], npt.NDArray[np.uint8]]
    """Gives a buffer of at least that many bytes; blocks while memory is short."""
    give_back: Callable[[npt.NDArray[np.uint8]], None] = lambda buffer: None
    """Takes a buffer that is not handed on."""
    on_lost: Callable[[Sample], None] = lambda sample: None
    """Takes a sample whose last rows came and of which earlier ones are no longer held."""
    prefixes: PrefixRows | None = None
    """Holds rows for other samples; None where the engine computes every row."""
    copies: Copies = field(default_factory=Copies)
    step_tokens: int = 1 << 62
    """Of a step with more tokens in samples that begin, what is complete is handed on before the next begins, so that
    their buffers can be used again. The same on all ranks: what is held for others would differ else."""
    _samples: dict[str, Sample] = field(default_factory=dict)
    _expected: dict[str, _Expected] = field(default_factory=dict)
    _placed: list[_Placed] = field(default_factory=list)
    """Rows of this step; their states are still to be copied."""
    _begun_tokens: int = 0
    """Of samples begun since any were handed on."""
    _unsettled: dict[str, Sample] = field(default_factory=dict)
    """Samples of this step that were not handed on."""

    def expect(
        self,
        key: str,
        num_tokens: int,
        directory: Path,
        *,
        keeps: bool = True,
        prefix: Sequence[bytes] = (),
        shared: int = 0,
    ) -> None:
        """Announce a sample that the engine will be asked for.

        Args:
            key: of the sample.
            num_tokens: T
            directory: to stage it in.
            keeps: whether this rank keeps its states, or only their digests.
            prefix: names of its first blocks, whose rows are held for others.
            shared: tokens with which other samples may begin, too.
        """
        expected = _Expected(num_tokens, directory, keeps, prefix, shared)
        if self._expected.get(key) != expected:  # a preempted request may be announced again
            begun = self._samples.pop(key, None)
            if begun is not None and begun.buffer is not None:
                self.give_back(begun.buffer)
            self._expected[key] = expected

    def forget(self, key: str) -> Sample | None:
        """Stop expecting a sample; returns what there is of it if it was begun and not completed."""
        self._expected.pop(key, None)
        return self._samples.pop(key, None)

    def add(
        self,
        key: str,
        start: int,
        arrived: Arrived,
        rows: slice,
        state_rows: slice | None = None,
    ) -> None:
        """Place one request's rows of a step; :meth:`settle` ends the step.

        Args:
            key: of the sample; rows of samples that are not expected (a warm-up's, say) are ignored.
            start: absolute position of the first row.
            arrived: all rows of the step.
            rows: the request's rows in the summary.
            state_rows: its rows in the states, where those are not all of the step.
        """
        if key not in self._expected:
            return
        sample = self._samples.get(key) or self._begin(key)
        num_rows = min(rows.stop - rows.start, sample.num_tokens - start)
        if sample.complete or sample.error or sample.misshapen or num_rows <= 0:  # a decode step behind the prompt
            return
        stop = start + num_rows
        if start > sample.filled:
            if self.prefixes is None:
                gap = f"rows [{sample.filled}, {start}) of {sample.num_tokens}"
                sample.error = f"{gap} were never computed; was prefix caching on?"
                return
            sample.gaps.append((sample.filled, start))
            sample.whole_from = start
        else:
            # What the abandoned attempt of a preempted request lacked, or had from others, is computed now.
            sample.gaps = [(first, min(last, start)) for first, last in sample.gaps if first < start]
            kept = _cut_staged(sample, start)
            sample.reused = [r._replace(stop=min(r.stop, kept)) for r in sample.reused if r.start < kept]
            sample.whole_from = min(sample.whole_from, start)
        copies: list[Copy] = []
        if sample.bytes_LTB is not None:
            first = (state_rows or rows).start
            here_LTB = sample.bytes_LTB[:, start:stop]
            last = first + here_LTB.shape[1]
            if isinstance(arrived.states, np.ndarray):
                copies = [(here_LTB, arrived.states[:, first:last])]
            else:
                copies = [(to, rows[first:last]) for to, rows in zip(here_LTB, arrived.states, strict=True)]
        sample.facts.put(start, arrived.facts, rows.start, rows.start + num_rows)
        # A preempted request starts again: what lies behind the rows that came anew is of the abandoned attempt.
        sample.filled = stop
        self._placed.append(_Placed(sample, start, stop, copies))

    def settle(self) -> None:
        """End a step: copy its rows, fill the gaps of its samples, and hand on those that are complete.

        Those that have all their rows but for gaps that cannot be filled are lost.
        """
        self._hand_on()
        unsettled, self._unsettled = self._unsettled, {}
        for sample in unsettled.values():
            if sample.complete:
                del self._samples[sample.key], self._expected[sample.key]
                self.on_lost(sample)

    def _hand_on(self) -> None:
        """Copy the rows placed so far, hold those that others may need, and hand on the samples that are complete.

        Gaps are filled last, since another sample of the same step may bring the rows; it may even be still to come.
        """
        placed, self._placed, self._begun_tokens = self._placed, [], 0
        copies = [copy for rows in placed for copy in rows.copies]
        self._write([there for there, _ in copies], copies)
        if self.prefixes is not None:
            self.prefixes.hold([self._to_hold(rows, self.prefixes.block) for rows in placed])
        self._unsettled.update((rows.sample.key, rows.sample) for rows in placed)
        filled: list[npt.NDArray[np.uint8]] = []
        copies = []
        whole: list[Sample] = []
        for sample in sorted(self._unsettled.values(), key=lambda sample: bool(sample.gaps)):
            rows, copies_of_it = self._fill(sample)
            filled += rows
            copies += copies_of_it
            if sample.complete and not sample.gaps:
                whole.append(sample)
                # Before the next one is filled: of a family in one step, the first is staged and the others link to it.
                self._promise(sample)
        self._write(filled, copies)
        for sample in whole:
            del self._unsettled[sample.key]
            self._finish(sample)

    def _fill(self, sample: Sample) -> tuple[list[npt.NDArray[np.uint8]], list[Copy]]:
        """Fill the gaps whose rows are held.

        Returns:
            Its rows that are to be written, and the copies that do so; to be made before anything else is held.
        """
        rows: list[npt.NDArray[np.uint8]] = []
        copies: list[Copy] = []
        missing = []
        for first, last in sample.gaps:
            assert self.prefixes is not None
            found = self.prefixes.fill(sample, sample.prefix, first, last, states=sample.keeps)
            if found is None:
                missing.append((first, last))
            else:
                sample.reused += found.reused
                sample.staged = sorted([*sample.staged, *found.staged], key=lambda rows: rows.start)
                copies += found.copies
                if sample.bytes_LTB is not None and sample.keeps:
                    for start, stop in uncovered(found.staged, first, last):
                        rows.append(sample.bytes_LTB[:, start:stop])
        sample.gaps = missing
        return rows, copies

    def _write(self, rows: Sequence[npt.NDArray[np.uint8]], copies: Sequence[Copy]) -> None:
        """Poison rows of samples, each [L, N, B] or [N, B], and copy what belongs there."""
        self.copies.mark(rows, POISONED_COLUMNS * self.dtype.itemsize, _NAN_BYTE)
        self.copies.run(copies)

    def _promise(self, sample: Sample) -> None:
        if self.prefixes is not None and sample.bytes_LTB is not None and sample.keeps:
            sample.promised = self.prefixes.staged.promise(sample.prefix, sample.shared, sample.facts.digests_NL)

    def _to_hold(self, rows: _Placed, block: int) -> Holding:
        """The blocks of a sample's prefix that new rows complete."""
        sample = rows.sample
        first = max(rows.start // block, -(-sample.whole_from // block))
        last = min(rows.stop // block, len(sample.prefix))
        return Holding(sample, sample.prefix[first:last], first * block)

    def _finish(self, sample: Sample) -> None:
        del self._samples[sample.key], self._expected[sample.key]
        if self.prefixes is not None:
            self.prefixes.touch(sample.prefix)
        if sample.buffer is not None and not sample.keeps:
            self.give_back(sample.buffer)
            sample.bytes_LTB = sample.buffer = None
        self.on_complete(sample)

    def refuse(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        """Note that the states of a step have another shape or element type than asked for; the first such counts."""
        if key in self._expected:
            sample = self._samples.get(key) or self._begin(key)
            sample.misshapen = sample.misshapen or (shape, dtype)

    def _begin(self, key: str) -> Sample:
        num_tokens, directory, keeps, prefix, shared = self._expected[key]
        if self._begun_tokens and self._begun_tokens + num_tokens > self.step_tokens:
            self._hand_on()
        self._begun_tokens += num_tokens
        rows = buffer = None
        if keeps:
            kept = num_tokens
        elif self.prefixes is not None and self.prefixes.holds_states:
            # Samples are dealt over the ranks: what another one keeps, this one's may begin with.
            kept = len(prefix) * self.prefixes.block
        else:
            kept = 0
        if kept:
            row_bytes = self.hidden_size * self.dtype.itemsize
            num_bytes = self.num_depths * kept * row_bytes
            buffer = self.take(num_bytes)
            rows = buffer[:num_bytes].reshape(self.num_depths, kept, row_bytes)
        sample = Sample(
            key=key,
            num_tokens=num_tokens,
            hidden_size=self.hidden_size,
            directory=directory,
            keeps=keeps,
            dtype=self.dtype,
            bytes_LTB=rows,
            buffer=buffer,
            facts=RowFacts.unknown(num_tokens, self.num_depths),
            prefix=prefix,
            shared=shared,
        )
        self._samples[key] = sample
        return sample


def _cut_staged(sample: Sample, start: int) -> int:
    """Let go of staged rows of which some, from ``start`` on, are computed now; rows before them are a gap again.

    Returns:
        The first row that is not there; ``start`` if none is missing before it.
    """
    cut = next((rows.start for rows in sample.staged if rows.stop > start), start)
    if cut >= start:
        cut = start
    else:
        sample.gaps.append((cut, start))
    sample.staged = [rows for rows in sample.staged if rows.stop <= cut]
    return cut
