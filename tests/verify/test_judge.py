"""Each check refuses what it is there for, by its own name; clean samples pass; and no check can be left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.digest import row_digests
from tasks.verify import judge as judging
from tasks.verify.bands import MIN_SAMPLES, Bands, Outside, band
from tasks.verify.config import Audit
from tasks.verify.judge import CHECKS, Case, judge
from tasks.vocabulary import Identity, PlannedSample, Proof, Receipt, RowEvidence

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
        "unlike_rows": (0, 0),
        "healed_rows": (0, 0),
        "repeated_rows": (0, 0),
        "carried_rows": (0, 0),
        "median_rms": (1.0, 1.0),
        "changed_rows": (0, 0) if rank == 0 else None,
        "unwritten_rows": (0, 0) if rank == 0 else None,
    }
    return Receipt(**(clean | changes))


def case(*receipts: Receipt, **changes: Any) -> Case:
    return Case(IDENTITY, PlannedSample("k", 5, (0,)), "ids", 2, receipts, Audit(), **changes)


def both(**changes: Any) -> Case:
    return case(receipt(0, **changes), receipt(1, **changes))


#: reason -> samples that this check, and no other, refuses
FAULTS: dict[str, list[Case]] = {
    "ranks": [case(receipt(0)), case(receipt(0), receipt(1), receipt(1)), both(key="x")],
    "capture": [case(receipt(0, error="OSError: disk full"), receipt(1))],
    "shape": [case(receipt(0), receipt(1, shape=(2, 4, 8))), both(shape=(771, 512))],
    "dtype": [case(receipt(0), receipt(1, dtype="bfloat16"))],
    "rows": [
        case(receipt(0, rows=((0, 3),)), receipt(1, rows=((2, 5),), objects={})),
        case(receipt(0, rows=((0, 3),)), receipt(1, rows=((4, 5),), objects={})),
        case(receipt(0, rows=((0, 5),)), receipt(1)),
    ],
    "token_ids": [case(receipt(0), receipt(1, ids_digest="other"))],
    "finite": [both(nonfinite=(0, 3), healed_rows=(0, 1))],
    "model_finite": [both(nonfinite=(3, 3))],
    "zero_rows": [case(receipt(0, zero_rows=(1, 0)), receipt(1))],
    "repeated_rows": [both(repeated_rows=(0, 2))],
    "agreement": [case(receipt(0), receipt(1, digests=("a", "c")))],
    "written": [case(receipt(0, unwritten_rows=(0, 2)), receipt(1))],
    "arrival": [
        case(receipt(0, staged_digests=("a", "x"), changed_rows=(0, 1)), receipt(1)),
        case(receipt(0, objects=None), receipt(1)),
        case(receipt(0), receipt(1, objects={})),
    ],
    "distinct_depths": [
        case(receipt(0, digests=("a", "a"), staged_digests=("a", "a")), receipt(1, digests=("a", "a"))),
        both(carried_rows=(0, 1)),
    ],
    "witness": [case(receipt(0), receipt(1, unlike_rows=(0, 5)))],
    "next_token": [case(receipt(0), receipt(1), proof=Proof("failed", 5, 7, 2.0, 0.1))],
    "usual_size": [case(receipt(0), receipt(1), outside=[Outside(3, 90.0, 0.5, 2.0)])],
}


def test_a_clean_sample_is_accepted() -> None:
    verdict = judge(case(receipt(0), receipt(1)))
    assert verdict.accepted
    assert verdict.reason is None


@pytest.mark.parametrize("reason", FAULTS)
def test_each_fault_is_refused_by_its_own_check(reason: str) -> None:
    for fault in FAULTS[reason]:
        verdict = judge(fault)
        assert not verdict.accepted
        assert verdict.reason == reason
        assert verdict.detail


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_no_check_can_be_left_out(check: Callable[[Case], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, one of the faults above would be accepted or given another reason."""
    monkeypatch.setattr(judging, "CHECKS", tuple(c for c in CHECKS if c is not check))
    missed = [fault for fault in FAULTS[check.__name__] if judge(fault).reason != check.__name__]
    assert missed == FAULTS[check.__name__]
    assert any(judge(fault).accepted for fault in missed) or check.__name__ in SHADOWED


#: Checks whose faults others would refuse as well, less clearly.
SHADOWED = ("ranks", "finite", "written")


def test_every_check_has_a_fault() -> None:
    assert {check.__name__ for check in CHECKS} == set(FAULTS)


def test_shared_rows_that_cover_the_sample_once_are_accepted() -> None:
    shares = case(receipt(0, rows=((0, 3),), shape=(2, 3, 8)), receipt(1, rows=((3, 5),), shape=(2, 2, 8), objects={}))
    assert judge(shares).accepted


def test_a_near_tie_and_a_sample_without_a_proof_are_accepted() -> None:
    assert judge(case(receipt(0), receipt(1), proof=Proof("near tie", 5, 7, 0.01, 0.1))).accepted
    assert judge(both_unwatched()).accepted


def both_unwatched() -> Case:
    return case(receipt(0, unlike_rows=None), receipt(1, unlike_rows=None))


def test_nan_of_the_model_is_told_from_nan_of_the_capture() -> None:
    model = judge(both(nonfinite=(3, 3)))
    assert "the model itself computed NaN" in model.detail
    for sign in (
        both(nonfinite=(3, 0), healed_rows=(1, 0)),
        both(nonfinite=(3, 0), unlike_rows=(1, 0)),
        case(receipt(0, nonfinite=(3, 0)), receipt(1)),
    ):
        verdict = judge(sign)
        assert verdict.reason == "finite"
        assert "a capture fault left NaN" in verdict.detail


def test_the_detail_has_the_figures_and_the_diagnosis() -> None:
    verdict = judge(both(shape=(2, 5, 4)))
    assert verdict.detail.startswith("rank 0 holds [2, 5, 4]; rank 1 holds [2, 5, 4], expected [2, 5, 8]: ")
    assert verdict.detail.endswith("one rank's shard of the hidden axis: 4 = 8 / 2")
    assert judge(both(nonfinite=(0, 3), healed_rows=(0, 1))).detail.startswith(
        "a capture fault left NaN or infinite elements, by depth: {3: 3}"
    )


def test_a_disagreement_is_measured() -> None:
    states = torch.arange(80, dtype=torch.float32).reshape(2, 5, 8)
    wrong = states.clone()
    wrong[1, 2, 0] += 0.5

    def evidence(of: torch.Tensor) -> RowEvidence:
        digests_TL = np.stack([row_digests(rows).numpy() for rows in of], axis=1)
        return RowEvidence(digests_TL.astype("<i8").tobytes(), (2,), of[:, [2]].numpy().astype("<f4").tobytes())

    fault = case(
        receipt(0, evidence=evidence(states)),
        receipt(1, evidence=evidence(wrong), digests=("a", "c"), unlike_rows=(0, 1)),
    )
    assert judge(fault).detail == (
        "ranks disagree on the states (rank 1 against the others): r_3 of ranks 0 and 1: 1 rows from row 2, "
        "max abs 0.5, cosine 0.999996"
    )


def test_evidence_is_small_and_plain() -> None:
    full = replace(receipt(0), last_row=b"x" * 14_336, evidence=RowEvidence(b"y" * 100_000))
    kept = full.to_evidence()
    assert kept["digests"] == ("a", "b")
    assert not {"last_row", "evidence", "objects", "profile"} & set(kept)


# --- bands


def sample_of(rms: float, num_tokens: int = 100) -> tuple[int, tuple[float, ...]]:
    return num_tokens, (rms, 2 * rms)


def test_bands_find_what_is_too_large_or_too_small() -> None:
    bands = Bands((1, 3))
    random = np.random.default_rng(0)
    usual = {f"u{i}": sample_of(float(np.exp(random.normal(0, 0.1)))) for i in range(100)}
    assert bands.judge(usual) == {}
    for num_tokens, rms in usual.values():
        bands.learn(num_tokens, rms)
    found = bands.judge({"large": sample_of(5.0), "small": sample_of(0.1), "usual": sample_of(1.2)})
    assert set(found) == {"large", "small"}
    assert [outside.depth for outside in found["large"]] == [1, 3]
    assert "usual is" in str(found["small"][0])


def test_bands_hold_when_a_third_is_wrong() -> None:
    mixed = {f"u{i}": sample_of(1 + 0.01 * i) for i in range(20)} | {f"w{i}": sample_of(50.0) for i in range(9)}
    assert set(Bands((1, 3)).judge(mixed)) == {f"w{i}" for i in range(9)}


def test_few_samples_and_other_lengths_make_no_band() -> None:
    few = {f"u{i}": sample_of(1.0) for i in range(MIN_SAMPLES - 2)} | {"w": sample_of(1000.0)}
    assert Bands((1, 3)).judge(few) == {}
    # A sample of one token is all massive activation; its like are compared with each other.
    many = {f"u{i}": sample_of(1.0) for i in range(50)} | {"one": sample_of(1000.0, num_tokens=1)}
    assert Bands((1, 3)).judge(many) == {}


def test_a_band_is_never_narrower_than_a_factor_of_two() -> None:
    assert band([1.0] * 50) == pytest.approx((0.5, 2.0))
    assert band([0.0, float("nan")]) == (0.0, float("inf"))
