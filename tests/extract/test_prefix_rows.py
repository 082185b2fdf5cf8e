"""Rows taken from other samples: whatever is shared, held, staged, let go of or preempted, a sample is right or not
there."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.digest import row_digests, sample_digest
from tasks.extract.assemble import Arrived, Assembler, Sample, summarize
from tasks.extract.prefix_rows import PrefixRows
from tasks.prefixes import prefix_names
from tasks.vocabulary import SharedChunk

L, H, BLOCK = 2, 4, 4
CHUNK = 6
"""Tokens of a chunk in a file, of which one sample's may be a link to another's."""
HERE = Path()
SLOT_BYTES = BLOCK * (L * (H * 4 + 8 + 8 + 4 + 1 + 1) + 4)


def states_of(ids: Sequence[int]) -> torch.Tensor:
    """[L, T, H]: rows that depend on their token and on all before it, as a causal model's do."""
    seen = torch.tensor([hash(tuple(ids[: i + 1])) % 1000 for i in range(len(ids))], dtype=torch.float32)
    return seen[None, :, None] + torch.arange(L * H, dtype=torch.float32).view(L, 1, H) / 8 + 1


class Rank:
    """An assembler with held prefixes, fed as by an engine."""

    def __init__(
        self, slots: int = 1000, keeps: bool = True, holds: bool = True, stages: bool = False, step_tokens: int = 1000
    ) -> None:
        self.stages, self.keeps = stages, keeps
        self.files: dict[str, torch.Tensor] = {}
        """Rows of chunks by name, [L, CHUNK, H]."""
        self.done: dict[str, Sample] = {}
        self.lost: dict[str, Sample] = {}
        self.given_back = 0
        self.done_before: list[list[str]] = []
        """What was handed on when each sample was begun."""
        self.prefixes = PrefixRows(
            block=BLOCK,
            num_depths=L,
            hidden_size=H,
            dtype=torch.float32,
            limit_bytes=slots * SLOT_BYTES,
            holds_states=holds,
        )
        self.to = Assembler(
            num_depths=L,
            hidden_size=H,
            dtype=torch.float32,
            on_complete=self._complete,
            take=self._take,
            give_back=self._count,
            step_tokens=step_tokens,
            on_lost=lambda sample: self.lost.update({sample.key: sample}),
            prefixes=self.prefixes,
        )

    def _take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        self.done_before.append([*self.done])
        return np.full(num_bytes, 0xFF, np.uint8)

    def _complete(self, sample: Sample) -> None:
        self.done[sample.key] = sample
        if self.stages and sample.states_LTH is not None:
            self.stage(sample)

    def stage(self, sample: Sample) -> None:
        """Do as the writer does: link to the chunks that are staged, and offer the others."""
        assert sample.states_LTH is not None
        for rows in sample.staged:
            assert sample.states_LTH[:, rows.start : rows.stop].isnan().all(), "they were copied for nothing"
            staged = rows.files().chunks
            chunk = torch.stack([self.files[staged[f"{rows.start} {depth}"].name] for depth in range(L)])
            sample.states_LTH[:, rows.start : rows.stop] = chunk
        chunks = {}
        for start in range(0, len(sample.prefix) * BLOCK - CHUNK + 1, CHUNK):
            if sample.num_tokens <= CHUNK or any(rows.start == start for rows in sample.staged):
                continue
            for depth in range(L):
                name = f"{sample.key} {start} {depth}"
                self.files[name] = sample.states_LTH[depth, start : start + CHUNK].clone()
                chunks[f"{start} {depth}"] = SharedChunk(name, start, start + CHUNK, 1)
        digests_TL = np.stack([row_digests(rows_TH).numpy() for rows_TH in sample.states_LTH], axis=1)
        assert not any(rows.failed for rows in sample.promised)
        self.prefixes.staged.learn(sample.prefix, sample.promised, chunks, digests_TL, digests_TL)

    def _count(self, _buffer: npt.NDArray[np.uint8]) -> None:
        self.given_back += 1

    def expect(self, samples: dict[str, list[int]]) -> None:
        for key, ids in samples.items():
            prefix = prefix_names(ids, BLOCK)
            self.to.expect(key, len(ids), HERE, keeps=self.keeps, prefix=prefix, shared=len(ids))

    def step(self, *spans: tuple[str, list[int], int, int]) -> None:
        """One step with rows [start, stop) of each of several samples."""
        states = torch.cat([states_of(ids)[:, start:stop] for _, ids, start, stop in spans], dim=1)
        tokens = torch.tensor([token for _, ids, start, stop in spans for token in ids[start:stop]])
        arrived, place = Arrived.of(states, summarize(tuple(states), tokens)), 0
        for key, _, start, stop in spans:
            self.to.add(key, start, arrived, slice(place, place + stop - start))
            place += stop - start
        self.to.settle()


def check(sample: Sample, ids: list[int]) -> None:
    assert sample.states_LTH is not None
    assert torch.equal(sample.states_LTH, states_of(ids))
    assert sample.facts.input_ids_N.tolist() == ids
    expected = [sample_digest(row_digests(rows_TH).numpy()) for rows_TH in states_of(ids)]
    assert [sample_digest(sample.facts.digests_NL[:, d]) for d in range(L)] == expected
    assert np.isfinite(sample.facts.squares_NL).all()


def test_rows_of_a_prefix_come_from_the_sample_that_computed_them() -> None:
    a, b = [*range(12)], [*range(8), 50, 51]
    rank = Rank()
    rank.expect({"a": a, "b": b})
    rank.step(("a", a, 0, 12))
    rank.step(("b", b, 8, 10))
    check(rank.done["b"], b)
    assert [tuple(r) for r in rank.done["b"].reused] == [(0, 8, "a")]
    assert rank.done["a"].reused == []


def test_rows_of_the_same_step_count_whatever_its_order() -> None:
    a, b, c = [*range(12)], [*range(8), 50, 51, 52, 53], [*range(8), 50, 51, 52, 53, 7]
    rank = Rank()
    rank.expect({"a": a, "b": b, "c": c})
    rank.step(("c", c, 12, 13), ("b", b, 8, 12), ("a", a, 0, 12))
    for key, ids in {"a": a, "b": b, "c": c}.items():
        check(rank.done[key], ids)
    assert [tuple(r) for r in rank.done["c"].reused] == [(0, 8, "a"), (8, 12, "b")]


def test_a_sample_that_is_wholly_the_prefix_of_another() -> None:
    whole = [*range(20)]
    rank = Rank()
    rank.expect({"long": whole, "short": whole[:16], "odd": whole[:14]})
    rank.step(("long", whole, 0, 20))
    rank.step(("short", whole[:16], 12, 16), ("odd", whole[:14], 12, 14))
    check(rank.done["short"], whole[:16])
    check(rank.done["odd"], whole[:14])


def test_rows_that_are_staged_are_not_copied() -> None:
    a, b, c = [*range(20)], [*range(16), 50, 51], [*range(8), 60]
    rank = Rank(stages=True)
    rank.expect({"a": a, "b": b, "c": c})
    rank.step(("a", a, 0, 20))
    rank.step(("b", b, 16, 18), ("c", c, 8, 9))
    for key, ids in {"b": b, "c": c}.items():
        check(rank.done[key], ids)
    assert [(rows.start, rows.stop) for rows in rank.done["b"].staged] == [(0, 6), (6, 12)]
    assert [(rows.start, rows.stop) for rows in rank.done["c"].staged] == [(0, 6)]
    assert [tuple(r) for r in rank.done["b"].reused] == [(0, 16, "a")], "they are reused none the less"


def test_a_family_in_one_step_is_staged_once() -> None:
    """Each of it has a gap, since all samples begin alike; the first to be whole is who the others link to."""
    before = [*range(8), 99]
    family = {name: [*range(20), last] for name, last in {"a": 50, "b": 51, "c": 52}.items()}
    rank = Rank(stages=True)
    rank.expect({"before": before} | family)
    rank.step(("before", before, 0, 9))
    rank.step(("a", family["a"], 8, 21), ("b", family["b"], 20, 21), ("c", family["c"], 20, 21))
    for key, ids in family.items():
        check(rank.done[key], ids)
    assert [(rows.start, rows.stop) for rows in rank.done["a"].staged] == [(0, 6)]
    for key in ("b", "c"):
        assert [(rows.start, rows.stop) for rows in rank.done[key].staged] == [(0, 6), (6, 12), (12, 18)]


def test_samples_with_gaps_make_room_for_the_next_of_their_step() -> None:
    a, b, c, d = [*range(12)], [*range(8), 50], [*range(12), 52, 53, 54, 55], [*range(12), 52, 53, 54, 55, 9]
    rank = Rank(step_tokens=1)
    rank.expect({"a": a, "b": b, "c": c, "d": d})
    rank.step(("a", a, 0, 12))
    # The rows that d lacks are still to come when c is begun: it waits, and nothing else does.
    rank.step(("d", d, 16, 17), ("b", b, 8, 9), ("c", c, 12, 16))
    assert rank.done_before == [[], ["a"], ["a"], ["a", "b"]]
    assert [*rank.done] == ["a", "b", "d", "c"]
    for key, ids in {"a": a, "b": b, "c": c, "d": d}.items():
        check(rank.done[key], ids)


def test_a_preempted_sample_may_need_rows_that_it_had_not_copied() -> None:
    a, b = [*range(20)], [*range(16), 50, 51, 52]
    rank = Rank(stages=True)
    rank.expect({"a": a, "b": b})
    rank.step(("a", a, 0, 20))
    rank.step(("b", b, 16, 18))
    rank.step(("b", b, 8, 19))  # the middle of a chunk
    check(rank.done["b"], b)
    assert [(rows.start, rows.stop) for rows in rank.done["b"].staged] == [(0, 6)]
    assert [tuple(r) for r in rank.done["b"].reused] == [(0, 6, "a"), (6, 8, "a")]


def test_rows_are_copied_where_the_staged_ones_have_other_bits() -> None:
    a, b = [*range(20)], [*range(16), 50]
    rank = Rank()
    rank.expect({"a": a, "b": b})
    rank.step(("a", a, 0, 20))
    chunks = {f"{depth}": SharedChunk("other", 0, CHUNK, 1) for depth in range(L)}
    digests_TL = rank.done["a"].facts.digests_NL.copy()
    digests_TL[3, 1] += 1
    rank.prefixes.staged.learn(prefix_names(a, BLOCK), [], chunks, digests_TL, digests_TL)
    rank.step(("b", b, 16, 17))
    check(rank.done["b"], b)
    assert rank.done["b"].staged == []


def test_chunks_count_as_staged_at_all_depths_or_not_at_all() -> None:
    rank = Rank()
    digests_TL = np.zeros((8, L), np.int64)
    names = prefix_names([*range(8)], BLOCK)
    rank.prefixes.staged.learn(names, [], {"0": SharedChunk("one depth", 0, CHUNK, 1)}, digests_TL, digests_TL)
    assert rank.prefixes.staged.find(names, 0, 8, digests_TL) == []


def test_what_is_forgotten_is_not_known_to_be_staged() -> None:
    rank = Rank(stages=True)
    a, b = [*range(12)], [*range(8), 9, 9, 9]
    rank.expect({"a": a, "b": b})
    rank.step(("a", a, 0, 12))
    rank.prefixes.clear()
    assert rank.prefixes.staged.find(prefix_names(a, BLOCK), 0, 12, rank.done["a"].facts.digests_NL) == []
    rank.step(("b", b, 8, 11))
    assert rank.lost["b"].gaps == [(0, 8)]


def test_rows_that_are_no_longer_held_make_no_sample() -> None:
    a, b, other = [*range(12)], [*range(8), 50, 51], [*range(100, 112)]
    rank = Rank(slots=2)
    rank.expect({"a": a, "b": b, "other": other})
    rank.step(("a", a, 0, 12))
    rank.step(("other", other, 0, 12))
    rank.step(("b", b, 8, 10))
    assert "b" not in rank.done
    assert rank.lost["b"].gaps == [(0, 8)]
    assert rank.to.forget("b") is None
    rank.expect({"b": b})  # computed again, whole
    rank.step(("b", b, 0, 10))
    check(rank.done["b"], b)
    assert rank.done["b"].reused == []


def test_without_room_nothing_is_held() -> None:
    a, b = [*range(12)], [*range(8), 50, 51]
    rank = Rank(slots=0)
    rank.expect({"a": a, "b": b})
    rank.step(("a", a, 0, 12))
    rank.step(("b", b, 8, 10))
    assert set(rank.done) == {"a"}


def test_a_preempted_sample_computes_what_it_had_reused() -> None:
    a, b = [*range(12)], [*range(8), 50, 51, 52, 53, 54]
    rank = Rank()
    rank.expect({"a": a, "b": b})
    rank.step(("a", a, 0, 12))
    rank.step(("b", b, 8, 10))
    rank.step(("b", b, 4, 11))
    rank.step(("b", b, 11, 13))
    check(rank.done["b"], b)
    assert [tuple(r) for r in rank.done["b"].reused] == [(0, 4, "a")]


def test_a_preempted_sample_may_come_back_further_on() -> None:
    """Another sample has computed, meanwhile, what the preempted one had not reached."""
    a, b = [*range(16)], [*range(12), 50]
    rank = Rank()
    rank.expect({"a": a, "b": b})
    rank.step(("b", b, 0, 3))
    rank.step(("a", a, 0, 16))
    rank.step(("b", b, 12, 13))
    check(rank.done["b"], b)
    assert [tuple(r) for r in rank.done["b"].reused] == [(3, 12, "a")]


def test_a_gap_that_could_not_be_filled_may_be_computed_after_a_preemption() -> None:
    b = [*range(13)]
    rank = Rank()
    rank.expect({"b": b})
    rank.step(("b", b, 8, 10))
    rank.step(("b", b, 0, 13))
    check(rank.done["b"], b)


def test_a_rank_that_keeps_no_states_reuses_what_it_knows_of_them() -> None:
    a, b = [*range(12)], [*range(8), 50, 51]
    first, second = Rank(), Rank(keeps=False, holds=False)
    for rank in (first, second):
        rank.expect({"a": a, "b": b})
        rank.step(("a", a, 0, 12))
        rank.step(("b", b, 8, 10))
    assert second.done["b"].states_LTH is None
    assert np.array_equal(first.done["b"].facts.digests_NL, second.done["b"].facts.digests_NL)
    assert first.done["b"].reused == second.done["b"].reused


def test_a_rank_holds_the_prefix_of_a_sample_that_another_keeps() -> None:
    a, b = [*range(12)], [*range(8), 50, 51]
    rank = Rank(keeps=False)
    rank.expect({"a": a})
    rank.keeps = True
    rank.expect({"b": b})
    rank.step(("a", a, 0, 12))
    rank.step(("b", b, 8, 10))
    assert rank.done["a"].states_LTH is None
    assert rank.given_back == 1
    check(rank.done["b"], b)


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    a = [*range(12)]
    rank = Rank(slots=3)
    rank.expect({"a": a, "other": [*range(100, 104)]})
    rank.step(("a", a, 0, 12))
    rank.step(("other", [*range(100, 104)], 0, 4))
    names = prefix_names(a, BLOCK)
    assert [name in rank.prefixes for name in names] == [True, True, False]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # few tokens: many shared prefixes


@given(st.lists(TOKENS, min_size=1, max_size=8, unique_by=tuple), st.integers(0, 12), st.data())
def test_every_sample_is_right_or_not_there(samples: list[list[int]], slots: int, data: st.DataObject) -> None:
    """An engine that takes from its cache what it has computed before, up to where it likes, in pieces, with
    preemptions; two ranks, of which one keeps no states, find the same."""
    ranks = [Rank(slots, stages=data.draw(st.booleans())), Rank(slots, keeps=False, holds=False)]
    named = {f"{i}": ids for i, ids in enumerate(samples)}
    computed: set[bytes] = set()
    for rank in ranks:
        rank.expect(named)
    for key, ids in named.items():
        names = prefix_names(ids, BLOCK)
        while True:
            hit = next((i for i, name in enumerate(names) if name not in computed), len(names))
            start = BLOCK * min(hit, (len(ids) - 1) // BLOCK, data.draw(st.integers(0, 4)))
            preempted = False
            while start < len(ids) and not preempted:
                stop = min(len(ids), start + data.draw(st.integers(1, 9)))
                for rank in ranks:
                    rank.step((key, ids, start, stop))
                computed.update(names[: stop // BLOCK])
                start = stop
                preempted = start < len(ids) and data.draw(st.booleans())
            if not preempted:
                break
        assert (key in ranks[0].done) == (key in ranks[1].done), "one rank finds what the other does"
        if key in ranks[0].done:
            check(ranks[0].done[key], ids)
            assert np.array_equal(ranks[0].done[key].facts.digests_NL, ranks[1].done[key].facts.digests_NL)
        else:
            left = [rank.lost.get(key) for rank in ranks]
            assert all(sample is not None and sample.gaps for sample in left)
    if slots >= 4 * len(samples):
        assert set(ranks[0].done) == set(named), "nothing is let go of while there is room"


@given(st.lists(TOKENS, min_size=1, max_size=10, unique_by=tuple), st.integers(0, 12), st.integers(1, 40), st.data())
def test_ranks_find_the_same_in_steps_of_many_samples(
    samples: list[list[int]], slots: int, step_tokens: int, data: st.DataObject
) -> None:
    """However few blocks are held, and wherever a step makes room for the next of its samples."""
    ranks = [
        Rank(slots, stages=data.draw(st.booleans()), step_tokens=step_tokens),
        Rank(slots, keeps=False, holds=False, step_tokens=step_tokens),
        Rank(slots, keeps=False, step_tokens=step_tokens),
    ]
    named = {f"{i}": ids for i, ids in enumerate(samples)}
    for rank in ranks:
        rank.expect(named)
    computed: set[bytes] = set()
    waiting = [*named]
    while waiting:
        size = data.draw(st.integers(1, 5))
        step, waiting = waiting[:size], waiting[size:]
        spans = []
        for key in step:
            ids = named[key]
            names = prefix_names(ids, BLOCK)
            hit = next((i for i, name in enumerate(names) if name not in computed), len(names))
            spans.append((key, ids, BLOCK * min(hit, (len(ids) - 1) // BLOCK), len(ids)))
            computed.update(names)
        spans = data.draw(st.permutations(spans))
        for rank in ranks:
            rank.step(*spans)
    first, *others = ranks
    for rank in others:
        assert rank.done.keys() == first.done.keys()
        assert [*rank.prefixes._held] == [*first.prefixes._held]
    for key, ids in named.items():
        if key in first.done:
            check(first.done[key], ids)
            assert np.array_equal(first.done[key].facts.digests_NL, others[0].done[key].facts.digests_NL)
        else:
            assert first.lost[key].gaps
