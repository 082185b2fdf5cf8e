"""The examiner of a run: proofs of whole chunks, sizes learned from what is otherwise good, and when to stop."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.extract.task import Halted, LazyEngine
from tasks.model import read
from tasks.plan.chunks import retries, split
from tasks.verify.config import Audit
from tasks.verify.examine import Examiner, last_rows
from tasks.verify.proof import Head
from tasks.vocabulary import Identity, PlannedSample, Receipt, Verdict
from tests.checkpoints import checkpoint_path
from tests.verify.test_judge import receipt

H, COUNT = 256, 20


@pytest.fixture(scope="module")
def identity() -> Identity:
    checkpoint = read(checkpoint_path("llama"))
    return Identity("m", checkpoint.architecture, checkpoint.num_layers, H, (3, 6), "input", (3, 6), "float32")


@pytest.fixture(scope="module")
def chunk() -> dict[str, Receipt]:
    """Receipts of samples whose sampled tokens are what their last rows give."""
    rows = torch.randn(COUNT, H, generator=torch.Generator().manual_seed(0))
    tokens = [proof.computed for proof in Head(read(checkpoint_path("llama"))).prove(rows, [0] * COUNT, 0)]
    return {
        f"k{i}": receipt(
            0,
            key=f"k{i}",
            world_size=1,
            shape=(2, 9, H),
            last_row=row.numpy().tobytes(),
            next_token=tokens[i],
            median_rms=(1.0 + i / 100, 2.0),
        )
        for i, row in enumerate(rows)
    }


def examine(identity: Identity, receipts: dict[str, Receipt], **audit: Any) -> tuple[Examiner, list[Verdict]]:
    examiner = Examiner(read(checkpoint_path("llama")), identity, 1, Audit(**audit))
    samples = [PlannedSample(key, 9, (0,)) for key in receipts]
    return examiner, examiner.examine(samples, {k: [r] for k, r in receipts.items()}, dict.fromkeys(receipts, "ids"))


def test_every_sample_is_proved(identity: Identity, chunk: dict[str, Receipt]) -> None:
    _, verdicts = examine(identity, chunk)
    assert all(v.accepted and v.proof and v.proof.outcome == "proved" for v in verdicts)


def test_a_wrong_token_is_refused(identity: Identity, chunk: dict[str, Receipt]) -> None:
    wrong = replace(chunk["k3"], next_token=((chunk["k3"].next_token or 0) + 1) % 256)
    _, verdicts = examine(identity, chunk | {"k3": wrong})
    assert {v.key: v.reason for v in verdicts if not v.accepted} == {"k3": "next_token"}


def test_without_the_last_depth_nothing_is_proved(identity: Identity, chunk: dict[str, Receipt]) -> None:
    _, verdicts = examine(replace(identity, depths=(3, 5)), chunk)
    assert all(v.accepted and v.proof is None for v in verdicts)


def test_usual_is_what_samples_are_that_are_otherwise_good(identity: Identity, chunk: dict[str, Receipt]) -> None:
    """Else samples that are wrong anyway would widen the band for one that is only too large."""
    bad = {
        f"b{i}": replace(chunk["k0"], key=f"b{i}", median_rms=(90.0, 90.0), zero_rows=(1, 0)) for i in range(2 * COUNT)
    }
    large = replace(chunk["k1"], median_rms=(50.0, 2.0))
    examiner, verdicts = examine(identity, chunk | bad | {"k1": large})
    refused = {v.key: v.reason for v in verdicts if not v.accepted}
    assert refused == dict.fromkeys(bad, "zero_rows") | {"k1": "usual_size"}
    # What was learned holds for a later chunk with too few samples to make a band of its own.
    later = replace(chunk["k2"], key="z", median_rms=(0.01, 2.0))
    (verdict,) = examiner.examine([PlannedSample("z", 9, (0,))], {"z": [later]}, {"z": "ids"})
    assert verdict.reason == "usual_size"


def test_a_sample_without_receipts_is_refused(identity: Identity) -> None:
    examiner = Examiner(read(checkpoint_path("llama")), identity, 1, Audit())
    (verdict,) = examiner.examine([PlannedSample("k", 9, (0,))], {}, {"k": "ids"})
    assert verdict.reason == "ranks"


@pytest.mark.parametrize(
    ("refused", "accepted", "share", "stops"),
    [(8, 7, 0.5, True), (8, 8, 0.5, False), (7, 0, 0.5, False), (100, 0, 1.0, False), (9, 91, 0.05, True)],
)
def test_a_run_stops_when_most_of_a_chunk_fails(
    identity: Identity, refused: int, accepted: int, share: float, stops: bool
) -> None:
    examiner = Examiner(read(checkpoint_path("llama")), identity, 1, Audit(stop_share=share))
    verdicts = [Verdict("k", False, "shape")] * refused + [Verdict("k", True)] * accepted
    assert examiner.is_systematic(verdicts) is stops


def test_one_fault_in_a_shared_prefix_is_one_fault(identity: Identity, chunk: dict[str, Receipt]) -> None:
    examiner = Examiner(read(checkpoint_path("llama")), identity, 1, Audit(stop_share=0.1))
    source = Verdict("source", False, "arrival", receipts=(chunk["k0"],))
    heirs = [
        Verdict(f"heir-{i}", False, "arrival", receipts=(replace(chunk["k1"], reused=(("source", 5),)),))
        for i in range(20)
    ]
    assert not examiner.is_systematic([source, *heirs])
    assert examiner.is_systematic(heirs), "here the source was good"


def test_a_halted_engine_is_not_started() -> None:
    engine = LazyEngine(None)  # type: ignore[arg-type]
    engine.halt("9 of 10 samples were refused")
    engine.halt("later")
    with pytest.raises(Halted, match="9 of 10"):
        engine.get()
    assert engine.started is None


def test_refused_samples_are_retried_alone_unless_they_are_many() -> None:
    samples = [PlannedSample(f"{i}" * 64, 5, (i,)) for i in range(6)]
    chunks = [replace(chunk, missing=chunk.samples) for chunk in split(samples, 10)]
    refused = [Verdict(samples[4].key, False, "shape"), Verdict(samples[0].key, False, "arrival")]
    again = retries(chunks, refused, limit=2)
    assert [(chunk.missing, verdict.reason) for chunk, verdict in again] == [
        ((samples[4],), "shape"),
        ((samples[0],), "arrival"),
    ]
    assert len({chunk.name for chunk, _ in again}) == 2
    assert retries(chunks, refused, limit=1) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_come_back_from_their_bits(dtype: str) -> None:
    rows = torch.randn(3, 8).to(getattr(torch, dtype))
    bits = rows.view(torch.uint16) if dtype == "bfloat16" else rows
    assert torch.equal(last_rows([row.numpy().tobytes() for row in bits], dtype), rows.float())
    assert np.isfinite(rows.float().numpy()).all()
