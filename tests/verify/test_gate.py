"""When a run stops: at once where the first samples are wrong, later only where most of a chunk is."""

import pytest

from tasks.verify.config import Audit
from tasks.verify.gate import Gate
from tasks.vocabulary import Verdict
from tests.verify.test_judge import receipt

NAN = "the model itself computed NaN"


def verdicts(refused: int, accepted: int, reason: str = "model_finite") -> list[Verdict]:
    return [Verdict("k", False, reason, NAN)] * refused + [Verdict("k", True)] * accepted


def opened(share: float = 0.5) -> Gate:
    gate = Gate(Audit(stop_share=share))
    assert gate.judge("chunk-0", verdicts(0, 1)) is None
    assert gate.is_open
    return gate


@pytest.mark.parametrize(
    ("refused", "accepted", "share", "stops"),
    [(8, 7, 0.5, True), (8, 8, 0.5, False), (7, 0, 0.5, False), (100, 0, 1.0, False), (9, 91, 0.05, True)],
)
def test_a_run_stops_when_most_of_a_chunk_fails(refused: int, accepted: int, share: float, stops: bool) -> None:
    assert (opened(share).judge("chunk-9", verdicts(refused, accepted)) is not None) is stops


@pytest.mark.parametrize(
    ("refused", "accepted", "share", "stops", "opens"),
    [
        (2, 0, 0.5, True, False),
        (2, 1, 0.5, True, False),
        (1, 0, 0.5, False, False),
        (2, 2, 0.5, False, True),
        (1, 3, 0.5, False, True),
        (9, 0, 1.0, False, False),
        (0, 0, 0.5, False, False),
    ],
)
def test_two_samples_suffice_until_a_chunk_has_passed(
    refused: int, accepted: int, share: float, stops: bool, opens: bool
) -> None:
    gate = Gate(Audit(stop_share=share))
    assert (gate.judge("chunk-0", verdicts(refused, accepted)) is not None) is stops
    assert gate.is_open is opens


def test_what_fails_is_counted_over_chunks_while_the_gate_is_closed() -> None:
    """Long samples make chunks of one."""
    gate = Gate(Audit())
    assert gate.judge("chunk-0", verdicts(1, 0, "next_token")) is None
    reason = gate.judge("chunk-1", verdicts(1, 0, "next_token"))
    assert reason is not None
    assert reason.startswith(
        "2 of 2 samples up to chunk-1, the first of this run, were refused, 2 of them by next_token"
    )


def test_one_bad_sample_at_first_does_not_close_the_way_for_good() -> None:
    gate = Gate(Audit())
    assert gate.judge("chunk-0", verdicts(1, 0)) is None
    assert gate.judge("chunk-1", verdicts(0, 1)) is None
    assert gate.is_open
    assert gate.judge("chunk-2", verdicts(7, 0)) is None


def test_the_reason_names_the_most_frequent_fault_with_an_example() -> None:
    mixed = [Verdict("k", False, "arrival", "changed"), *verdicts(9, 1)]
    reason = opened().judge("chunk-7", mixed)
    assert reason == (
        f"10 of 11 samples of chunk-7 were refused, 9 of them by model_finite: {NAN}; see the audit table"
    )


def test_one_fault_in_a_shared_prefix_is_one_fault() -> None:
    source = Verdict("source", False, "arrival", "changed")
    heir = receipt(0, reused=(("source", 5),))
    heirs = [Verdict(f"heir-{i}", False, "arrival", "changed", receipts=(heir,)) for i in range(20)]
    assert opened(0.1).judge("chunk-9", [source, *heirs]) is None
    assert opened(0.1).judge("chunk-9", heirs) is not None, "here the source was good"
