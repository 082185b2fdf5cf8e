"""Assembly: whatever way the rows arrive, a sample is handed on whole or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.digest import row_digests, sample_digest
from tasks.extract.assemble import Arrived, Assembler, Sample, summarize
from tasks.extract.copies import Copies, Copy
from tasks.extract.memory import HostMemory

L, H = 2, 4
HERE = Path()


def states(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(L, num_rows, H, generator=torch.Generator().manual_seed(seed))


def assembler(done: list[Sample], **changes: object) -> Assembler:
    settings = {
        "num_depths": L,
        "hidden_size": H,
        "dtype": torch.float32,
        "take": HostMemory(1 << 20).take,
    }
    return Assembler(**settings | changes, on_complete=done.append)  # type: ignore[arg-type]


def arrived(rows_LNH: torch.Tensor, ids: torch.Tensor) -> Arrived:
    return Arrived.of(rows_LNH, summarize(tuple(rows_LNH), ids))


def feed(to: Assembler, key: str, start: int, rows_LNH: torch.Tensor, ids: range) -> None:
    """Deliver rows surrounded by those of other requests, as in a batch."""
    pad = torch.full((L, 3, H), 99.0)
    batch = torch.cat([pad, rows_LNH, pad], dim=1)
    batch_ids = torch.tensor([7, 7, 7, *ids, 7, 7, 7])
    to.add(key, start, arrived(batch, batch_ids), slice(3, 3 + rows_LNH.shape[1]))
    to.settle()


@given(st.integers(1, 40), st.lists(st.integers(1, 15), max_size=8))
def test_pieces_become_the_whole(num_tokens: int, pieces: list[int]) -> None:
    done: list[Sample] = []
    to, whole = assembler(done), states(num_tokens, 1)
    to.expect("k", num_tokens, HERE)
    start = 0
    for size in [*pieces, num_tokens]:
        stop = min(start + size, num_tokens)
        if start < stop:
            assert not done
            feed(to, "k", start, whole[:, start:stop], range(start, stop))
        start = stop
    (sample,) = done
    assert sample.states_LTH is not None
    assert torch.equal(sample.states_LTH, whole)
    assert sample.facts.input_ids_N.tolist() == list(range(num_tokens))
    expected = [sample_digest(row_digests(whole[d]).numpy()) for d in range(L)]
    assert [sample_digest(sample.facts.digests_NL[:, d]) for d in range(L)] == expected


def test_a_preempted_sample_is_overwritten_from_where_it_starts_again() -> None:
    done: list[Sample] = []
    to, stale, fresh = assembler(done), states(10, 1), states(10, 2)
    to.expect("k", 10, HERE)
    feed(to, "k", 0, stale[:, :8], range(8))
    feed(to, "k", 0, fresh[:, :5], range(5))
    assert not done, "eight stale and two fresh rows would have covered the sample"
    feed(to, "k", 5, fresh[:, 5:], range(5, 10))
    assert done[0].states_LTH is not None
    assert torch.equal(done[0].states_LTH, fresh)


def test_a_gap_is_an_error_and_never_a_sample() -> None:
    done: list[Sample] = []
    to = assembler(done)
    to.expect("k", 40, HERE)
    feed(to, "k", 8, states(32, 1), range(8, 40))
    assert not done
    left = to.forget("k")
    assert left is not None
    assert left.error == "rows [0, 8) of 40 were never computed; was prefix caching on?"


def test_rows_behind_the_prompt_are_not_the_samples() -> None:
    done: list[Sample] = []
    to, rows = assembler(done), states(6, 1)
    to.expect("k", 5, HERE)
    feed(to, "k", 0, rows, range(6))
    assert done[0].states_LTH is not None
    assert torch.equal(done[0].states_LTH, rows[:, :5])


def test_samples_of_one_batch_stay_apart() -> None:
    done: list[Sample] = []
    to, rows = assembler(done), states(771, 3)
    to.expect("long", 512, HERE)
    to.expect("short", 259, HERE)
    step = arrived(rows, torch.arange(771))
    to.add("long", 0, step, slice(0, 512))
    to.add("short", 0, step, slice(512, 771))
    assert not done
    to.settle()
    assert {s.key: tuple(s.states_LTH.shape) for s in done if s.states_LTH is not None} == {
        "long": (L, 512, H),
        "short": (L, 259, H),
    }
    assert done[1].facts.input_ids_N[0] == 512


def test_a_sample_of_a_step_makes_room_for_the_next() -> None:
    """All copies of a step are made together, unless that would keep more in memory than may be."""
    for step_tokens, expected in ((6, []), (5, ["first", "second"]), (1, ["first", "second"])):
        done: list[Sample] = []
        handed_on: list[str] = []
        memory = HostMemory(1 << 20)

        def take(num_bytes: int, done: list[Sample] = done, seen: Any = handed_on, memory: Any = memory) -> Any:
            seen[:] = [sample.key for sample in done]
            return memory.take(num_bytes)

        to, rows = assembler(done, step_tokens=step_tokens, take=take), states(6, 3)
        for key in ("first", "second", "third"):
            to.expect(key, 2, HERE)
        step = arrived(rows, torch.arange(6))
        for i, key in enumerate(("first", "second", "third")):
            to.add(key, 0, step, slice(2 * i, 2 * i + 2))
        assert handed_on == expected
        to.settle()
        assert [sample.key for sample in done] == ["first", "second", "third"]
        for i, sample in enumerate(done):
            assert sample.states_LTH is not None
            assert torch.equal(sample.states_LTH, rows[:, 2 * i : 2 * i + 2])


def test_a_sample_may_have_several_pieces_in_a_step() -> None:
    done: list[Sample] = []
    to, rows = assembler(done), states(6, 3)
    to.expect("k", 6, HERE)
    for start in (0, 2, 4):
        to.add("k", start, arrived(rows, torch.arange(6)), slice(start, start + 2))
    to.settle()
    (sample,) = done
    assert sample.states_LTH is not None
    assert torch.equal(sample.states_LTH, rows)


class LossyCopies(Copies):
    """Loses the copies of the second depth."""

    def run(self, copies: Sequence[Copy]) -> None:
        super().run(copies[::L])


def test_unwritten_rows_are_poison() -> None:
    done: list[Sample] = []
    to, rows = assembler(done, copies=LossyCopies()), states(4, 1)
    to.expect("k", 4, HERE)
    feed(to, "k", 0, rows, range(4))
    (sample,) = done
    assert sample.states_LTH is not None
    assert torch.equal(sample.states_LTH[0], rows[0])
    assert torch.isnan(sample.states_LTH[1]).all()


def test_a_rank_that_only_digests_keeps_no_states() -> None:
    done: list[Sample] = []
    to = assembler(done)
    to.expect("k", 3, HERE, keeps=False)
    rows = states(3, 1)
    to.add("k", 0, Arrived.of((), summarize(tuple(rows), torch.arange(3))), slice(0, 3))
    to.settle()
    assert done[0].states_LTH is None
    assert np.array_equal(done[0].facts.digests_NL[:, 0], row_digests(rows[0]).numpy())


def test_the_summary_counts_what_is_wrong() -> None:
    rows = torch.ones(2, 3, H)
    rows[0, 1] = 0
    rows[1, 2, :2] = torch.tensor([torch.nan, torch.inf])
    summary = summarize(tuple(rows), torch.arange(3))
    assert summary.zero_NL.tolist() == [[False, False], [True, False], [False, False]]
    assert summary.nonfinite_NL.tolist() == [[0, 0], [0, 0], [0, 2]]
    assert summary.squares_NL[0].tolist() == [H, H]


def test_what_is_too_small_or_too_large_to_be_squared_is_neither_zero_nor_infinite() -> None:
    rows = torch.ones(3, 3, H)
    rows[0, 1] = torch.finfo(torch.float32).tiny
    rows[1, 1] = torch.finfo(torch.float32).max
    rows[2, 1, 1:] = 0
    summary = summarize(tuple(rows), torch.arange(3))
    assert not summary.zero_NL.any()
    assert not summary.nonfinite_NL.any()


def test_requests_that_were_not_announced_are_ignored() -> None:
    done: list[Sample] = []
    feed(assembler(done), "_warmup_0", 0, states(2, 1), range(2))
    assert not done
