"""Each check refuses what it is there for, by its own name, and clean samples pass."""

from dataclasses import replace
from typing import Any

import pytest

from tasks.verify.config import Audit
from tasks.verify.judge import CHECKS, Case, judge
from tasks.vocabulary import Identity, PlannedSample, Receipt

IDENTITY = Identity("m", "LlamaForCausalLM", 6, 8, (1, 3), "input", (1, 3), "float32")


def receipt(rank: int, **changes: Any) -> Receipt:
    clean: dict[str, Any] = {
        "key": "k",
        "rank": rank,
        "world_size": 2,
        "shape": (2, 5, 8),
        "dtype": "float32",
        "ids_digest": "ids",
        "digests": ("a", "b"),
        "staged_digests": ("a", "b") if rank == 0 else None,
        "objects": {"c": (1, 2)} if rank == 0 else None,
        "rms": (1.0, 1.0),
        "nonfinite": (0, 0),
        "zero_rows": (0, 0),
    }
    return Receipt(**(clean | changes))


def case(*receipts: Receipt) -> Case:
    return Case(IDENTITY, PlannedSample("k", 5, (0,)), "ids", 2, receipts, Audit())


def test_a_clean_sample_is_accepted() -> None:
    verdict = judge(case(receipt(0), receipt(1)))
    assert verdict.accepted
    assert verdict.reason is None


FAULTS = {
    "ranks": [receipt(0)],
    "capture": [receipt(0, error="OSError: disk full"), receipt(1)],
    "shape": [receipt(0), receipt(1, shape=(2, 4, 8))],
    "dtype": [receipt(0), receipt(1, dtype="bfloat16")],
    "token_ids": [receipt(0), receipt(1, ids_digest="other")],
    "finite": [receipt(0, nonfinite=(0, 3)), receipt(1)],
    "zero_rows": [receipt(0, zero_rows=(1, 0)), receipt(1)],
    "agreement": [receipt(0), receipt(1, digests=("a", "c"))],
    "arrival": [receipt(0, staged_digests=("a", "x")), receipt(1)],
    "distinct_depths": [
        receipt(0, digests=("a", "a"), staged_digests=("a", "a")),
        receipt(1, digests=("a", "a")),
    ],
}


@pytest.mark.parametrize("reason", FAULTS)
def test_each_fault_is_refused_by_its_own_check(reason: str) -> None:
    verdict = judge(case(*FAULTS[reason]))
    assert not verdict.accepted
    assert verdict.reason == reason
    assert verdict.detail


def test_every_check_has_a_fault() -> None:
    assert {check.__name__ for check in CHECKS} == set(FAULTS)


def test_a_sample_staged_twice_or_never_is_refused() -> None:
    both = judge(case(receipt(0), replace(receipt(0), rank=1)))
    none = judge(case(receipt(0, objects=None), receipt(1)))
    assert (both.reason, none.reason) == ("arrival", "arrival")


def test_the_detail_has_the_figures() -> None:
    verdict = judge(case(receipt(0), receipt(1, shape=(771, 512))))
    assert verdict.detail == "rank 1 holds [771, 512], expected [2, 5, 8]"
    assert judge(case(receipt(0, nonfinite=(0, 3)), receipt(1))).detail == "NaN or infinite elements by depth: {3: 3}"
