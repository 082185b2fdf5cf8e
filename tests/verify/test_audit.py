"""The audit of a store of real states: it passes, and whatever was done to the store afterwards is reported.

Damage comes in two kinds: bytes changed under a store that does not know of it, and samples committed anew with
every checksum in order, where only the values can tell.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from flows.cli import app
from infra.assets.chats import demo_chats
from tasks.digest import row_digests, sample_digest
from tasks.layers import Layers
from tasks.model import Checkpoint, final_norm, read
from tasks.report.audit_page import lines, page, rows, terminal
from tasks.store import FinalNorm, SourceRecord, StagedSample, Store
from tasks.store import open as open_store
from tasks.store.layout import seal
from tasks.store.stage import stage_states
from tasks.verify.audit import AuditError, AuditReport, audit, open_head
from tasks.verify.proof import Head
from tasks.verify.reference import residual_states
from tasks.verify.task import audit_store
from tasks.vocabulary import Identity
from tests.checkpoints import checkpoint_path

SAMPLES = 17  # enough for bands
LONG = 100  # tokens of the sample whose rows are shifted
DEPTHS = (3, 15, 27, 30)


@dataclass(frozen=True, eq=False)
class Made:
    """A sample as it was extracted."""

    ids: npt.NDArray[np.int32]
    states: torch.Tensor
    next_token: int
    digests: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Extracted:
    checkpoint: Checkpoint
    identity: Identity
    samples: tuple[Made, ...]

    def store(self, path: Path, samples: Sequence[Made] | None = None) -> Path:
        """Commit samples, each with a loss mask of ones and what the verification would have recorded."""
        norm = FinalNorm(*final_norm(self.checkpoint))
        with Store.open(path, self.identity, run="test", final_norm=norm) as store:
            staged, sources = [], []
            for number, made in enumerate(samples or self.samples):
                key, mask = self.identity.key(made.ids), np.ones(len(made.ids), bool)
                objects = stage_states(store.staging(), key, store.spec, made.states.numpy(), made.ids)
                capture = {"digests": made.digests, "ranks": 2}
                staged.append(StagedSample(key, len(made.ids), objects, mask, made.next_token, capture=capture))
                sources.append(SourceRecord(f"chat-{number}", key, mask))
            store.commit(staged)
            store.record(sources)
        return path

    def recompute(self, _key: str, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """The states as they were extracted."""
        return next(made.states for made in self.samples if np.array_equal(made.ids, ids))


def digests(states_LTH: torch.Tensor) -> tuple[str, ...]:
    return tuple(sample_digest(row_digests(rows_TH).numpy()) for rows_TH in states_LTH)


@pytest.fixture(scope="module")
def extracted() -> Extracted:
    """The demo's chats through the demo's model, by Hugging Face's forward."""
    path = checkpoint_path("smollm2")
    checkpoint = read(path)
    identity = checkpoint.identity(Layers(ids=DEPTHS, convention="input"), "float32")
    tokenizer, head = AutoTokenizer.from_pretrained(path), Head(checkpoint)
    samples = []
    with demo_chats().open(encoding="utf-8") as chats:
        for number, chat in enumerate(map(json.loads, islice(chats, SAMPLES))):
            text = "\n".join(message["content"] for message in chat["messages"])
            ids = np.array(tokenizer(text).input_ids[: LONG if number == 1 else 40], dtype=np.int32)
            states_LTH = residual_states(path, ids, DEPTHS)
            (last,) = head.prove(states_LTH[-1, -1:], [0], 0)
            samples.append(Made(ids, states_LTH, last.computed, digests(states_LTH)))
    return Extracted(checkpoint, identity, tuple(samples))


@pytest.fixture(scope="module")
def head(extracted: Extracted) -> Head:
    found = open_head(extracted.checkpoint, extracted.identity)
    assert found is not None
    return found


def reasons(report: AuditReport) -> dict[str, set[str]]:
    """Source -> reasons, of the samples with problems."""
    return {s.sources[0]: {problem.reason for problem in s.problems} for s in report.failed}


@pytest.fixture(scope="module")
def good(extracted: Extracted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted.store(tmp_path_factory.mktemp("good") / "s")


@pytest.fixture(scope="module")
def report(good: Path, head: Head) -> AuditReport:
    return audit(open_store(good), head)


def test_a_good_store_passes(report: AuditReport) -> None:
    assert report.passed, reasons(report)
    assert report.proofs("proved") == SAMPLES
    accuracy = report.accuracy()
    assert accuracy is not None
    print(f"next-token accuracy {accuracy:.1%}, shifted by one {report.accuracy(-1):.1%}")
    assert accuracy > 0.2
    assert max(report.accuracy(-1) or 0, report.accuracy(1) or 0) < accuracy / 2


def states_of(path: Path, source: str) -> Path:
    key = open_store(path).key_of(source)
    return path / "samples" / key[:2] / key / "hidden_states"


def test_one_flipped_byte_is_reported(good: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(good, tmp_path / "s"))
    chunk = states_of(path, "chat-4") / "c.0.0.0"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    report = audit(open_store(path), None)
    assert reasons(report) == {"chat-4": {"damaged"}}
    assert "does not match its checksum" in report.failed[0].problems[0].detail


@pytest.mark.parametrize("damage", ["flip", "remove", "other values"])
def test_a_damaged_final_norm_is_reported(good: Path, tmp_path: Path, extracted: Extracted, damage: str) -> None:
    path = Path(shutil.copytree(good, tmp_path / "s"))
    file = path / "final_norm_weight/c.0"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else seal(bytes(content[:-4])))
    report = audit_store.fn(open_store(path), extracted.checkpoint)
    assert (report.passed, report.failed) == (False, [])
    (problem,) = report.store_problems
    assert ("final norm is not the checkpoint's" if damage == "other values" else "writes it again") in problem
    assert problem in page(report).replace("&#x27;", "'")
    assert "failed" in str(terminal(report).title)


def test_an_audit_of_no_samples_does_not_pass(extracted: Extracted, tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", extracted.identity):
        pass
    report = audit(open_store(tmp_path / "s"), None)
    assert not report.passed
    assert report.store_problems == ["it has no samples, so nothing was proved"]
    assert "failed" in str(terminal(report).title)


def test_two_samples_whose_files_were_swapped_are_reported(good: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(good, tmp_path / "s"))
    first, second = states_of(path, "chat-1"), states_of(path, "chat-2")
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert reasons(audit(open_store(path), None)) == {"chat-1": {"damaged"}, "chat-2": {"damaged"}}


def swapped(samples: list[Made]) -> None:
    """Two samples of one length take each other's states."""
    n = min(len(samples[1].ids), len(samples[2].ids))
    for i in (1, 2):
        ids, states_LTH = samples[i].ids[:n], samples[i].states[:, :n].contiguous()
        samples[i] = replace(samples[i], ids=ids, states=states_LTH, digests=digests(states_LTH))
    samples[1], samples[2] = (
        replace(samples[1], states=samples[2].states),
        replace(samples[2], states=samples[1].states),
    )


def shifted(samples: list[Made]) -> None:
    samples[1] = replace(samples[1], states=samples[1].states.roll(1, dims=1))


def exchanged(samples: list[Made]) -> None:
    samples[1] = replace(samples[1], states=samples[1].states[[2, 1, 0, 3]].contiguous())


@pytest.mark.parametrize(
    ("tamper", "expected", "note"),
    [
        (swapped, {"digest", "next_token"}, "holds what r_3 of sample"),
        (shifted, {"digest", "next_token", "shifted"}, "rows predict the token 0 ahead instead of the next"),
        (exchanged, {"digest"}, "r_3 holds what r_27 of this sample was"),
    ],
)
def test_samples_committed_with_other_states_are_reported(
    extracted: Extracted,
    head: Head,
    tmp_path: Path,
    tamper: Callable[[list[Made]], None],
    expected: set[str],
    note: str,
) -> None:
    samples = list(extracted.samples[:4])
    tamper(samples)
    report = audit(open_store(extracted.store(tmp_path / "s", samples)), head)
    found = reasons(report)
    assert set(found) == ({"chat-1", "chat-2"} if tamper is swapped else {"chat-1"})
    assert found["chat-1"] >= expected
    assert note in page(report)


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [(swapped, {"next_token"}), (shifted, {"next_token", "shifted"}), (exchanged, {"usual_size"})],
)
def test_even_with_digests_to_match_the_values_tell(
    extracted: Extracted, head: Head, tmp_path: Path, tamper: Callable[[list[Made]], None], expected: set[str]
) -> None:
    samples = list(extracted.samples if tamper is exchanged else extracted.samples[:4])  # bands want many
    tamper(samples)
    samples = [replace(made, digests=digests(made.states)) for made in samples]
    found = reasons(audit(open_store(extracted.store(tmp_path / "s", samples)), head))
    assert found["chat-1"] >= expected


def test_the_reference_finds_what_is_off_by_little(extracted: Extracted, tmp_path: Path) -> None:
    samples = list(extracted.samples[:4])
    states = samples[3].states.clone()
    states[1, 7] *= 1.01
    samples[3] = replace(samples[3], states=states, digests=digests(states))
    report = audit(
        open_store(extracted.store(tmp_path / "s", samples)), None, reference="hf", recompute=extracted.recompute
    )
    assert reasons(report) == {"chat-3": {"reference"}}
    worst = report.worst(15)
    assert worst is not None
    assert (worst.worst_row, worst.worst_error) == (7, pytest.approx(0.01, rel=0.01))
    assert "relative error of a row" in dict(lines(report))["reference hf"]
    assert (report.worst(3) or worst).worst_error < 1e-5


def test_as_many_samples_are_compared_as_asked_for(extracted: Extracted, good: Path) -> None:
    asked = []

    def recompute(key: str, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        asked.append(key)
        return extracted.recompute(key, ids)

    report = audit(open_store(good), None, samples=3, reference="hf", recompute=recompute)
    assert len(asked) == 3
    assert sum(bool(s.parity) for s in report.samples) == 3


def test_invariants_are_looked_at_again(extracted: Extracted, head: Head, tmp_path: Path) -> None:
    samples = list(extracted.samples[:4])
    for i, change in enumerate(
        (
            lambda s: s[0, 3].fill_(torch.nan),
            lambda s: s[1, 4].zero_(),
            lambda s: s[2, 5].copy_(s[2, 6]),
            lambda s: s[1, 2].copy_(s[0, 2]),
        )
    ):
        states = samples[i].states.clone()
        change(states)
        samples[i] = replace(samples[i], states=states, digests=digests(states))
    found = reasons(audit(open_store(extracted.store(tmp_path / "s", samples)), head))
    assert found["chat-0"] == {"finite"}, "and nothing about its size"
    assert found["chat-1"] == {"zero_rows"}
    assert found["chat-2"] == {"repeated_rows"}
    assert found["chat-3"] == {"distinct_depths"}


def test_ids_that_the_key_does_not_stand_for_are_reported(extracted: Extracted, head: Head, tmp_path: Path) -> None:
    made = extracted.samples[0]
    other = made.ids.copy()
    other[3] += 1
    with Store.open(tmp_path / "s", extracted.identity, run="test") as store:
        key, mask = extracted.identity.key(made.ids), np.ones(len(other), bool)
        objects = stage_states(store.staging(), key, store.spec, made.states.numpy(), other)
        store.commit([StagedSample(key, len(other), objects, mask, made.next_token)])
        store.record([SourceRecord("chat-0", key, mask)])
    assert reasons(audit(open_store(tmp_path / "s"), head)) == {"chat-0": {"token_ids"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--reference", "vllm"], "choose hf or solo"), (["--samples", "3"], "choose how with --reference")],
)
def test_the_command_line_says_what_to_change(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["audit", "nowhere", *options])
    assert result.exit_code == 1
    assert message in result.output


def test_another_checkpoint_is_refused(extracted: Extracted) -> None:
    other = read(checkpoint_path("llama"))
    with pytest.raises(AuditError, match="name the right one with --model"):
        open_head(other, extracted.identity)


def test_the_page_needs_nothing_but_itself(report: AuditReport) -> None:
    report = replace(report, samples=[*report.samples])
    report.samples[0] = replace(report.samples[0], sources=("<script>alert(1)</script>",))
    text = page(report)
    assert "<script>" not in text
    assert "data:image/png;base64," in text
    assert "http" not in text
    assert text.count("<tr>") > SAMPLES
    assert len(rows(report, limit=5)) == 6
    assert rows(report, limit=5)[0]["source"] == "5 shown"
    assert terminal(report).row_count == len(lines(report))
