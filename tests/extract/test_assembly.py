"""Assembly in the worker's process and in one of its own: the same receipts, the same files, and clear ends."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.extract.assembly import Assembly, AssemblySpec, CaptureSettings, Place, Wanted
from tasks.extract.assembly_process import AssemblyDied, AssemblyProcess, Slot, slot_bytes
from tasks.extract.receipts import Inbox, Outbox, ReceiptsLost
from tasks.extract.step import Span, Step
from tasks.extract.transfer import DirectTransfer, SharedRing
from tasks.prefixes import prefix_names
from tasks.store import layout
from tasks.store.layout import StateSpec
from tasks.store.stage import STAGE, stage_states
from tasks.vocabulary import Receipt, StagingFailure
from tests.conftest import eventually
from tests.extract import small_chunks

L, H = 3, 64
LENGTHS = {"a" * 64: 5, "b" * 64: 1, "0" * 64: 12}
IDS = {key: np.arange(100, 100 + n, dtype=np.int32) for key, n in LENGTHS.items()}
RNG = torch.Generator().manual_seed(0)
STATES = {key: torch.randn(L, n, H, generator=RNG) for key, n in LENGTHS.items()}


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    box = Inbox(1)
    yield box
    box.close()


def spec(inbox: Inbox, stage: str = STAGE) -> AssemblySpec:
    return spec_for(inbox.address, stage)


def spec_for(receipts: str, stage: str = STAGE) -> AssemblySpec:
    state_spec = StateSpec(num_depths=L, hidden_size=H, dtype="float32")
    settings = CaptureSettings(
        stage=stage,
        stage_spec=state_spec.to_dict(),
        receipts=receipts,
        writer_threads=2,
        staging_bytes=1 << 20,
        ring_slots=2,
        deal=False,
        writer_process=None,
        reuse_bytes=0,
    )
    return AssemblySpec(
        rank=0,
        world_size=1,
        num_depths=L,
        hidden_size=H,
        dtype="float32",
        witnessed=False,
        block=16,
        settings=settings,
    )


def steps() -> Iterator[Step]:
    """Steps of at most eight rows; the last sample is longer than one."""
    pieces = [[("a" * 64, 0, 5), ("b" * 64, 0, 1), ("0" * 64, 0, 2)], [("0" * 64, 2, 10)], [("0" * 64, 10, 12)]]
    for step in pieces:
        spans, at = [], 0
        for key, start, stop in step:
            spans.append(Span(f"{key}-12345678", start, slice(at, at + stop - start)))
            at += stop - start
        states = torch.cat([STATES[key][:, start:stop] for key, start, stop in step], dim=1)
        ids = torch.cat([torch.from_numpy(IDS[key][start:stop]) for key, start, stop in step])
        yield Step(tuple(spans), tuple(states), ids)


def run(assembly: Assembly | AssemblyProcess, transfer: Any, inbox: Inbox, directory: Path) -> dict[str, Receipt]:
    inbox.accept()
    assembly.expect([Wanted(key, n, str(directory), 0) for key, n in LENGTHS.items()])
    for step in steps():
        transfer.send(step)
    found: Any = eventually(lambda: inbox.take(list(LENGTHS)))
    assert transfer.delivered == transfer.sent == 3
    inbox.expect_end()
    transfer.close()
    assembly.close()
    for key, ((_, digests),) in found.items():
        assert len(digests) == LENGTHS[key] * L * 8
    return {key: replace(receipt, profile=None) for key, ((receipt, _),) in found.items()}


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_process_of_its_own_does_the_same(tmp_path: Path) -> None:
    receipts, written = [], []
    for name in ("here", "there"):
        inbox = Inbox(1)
        asked = spec(inbox)
        if name == "here":
            assembly: Assembly | AssemblyProcess = Assembly(asked)
            transfer: Any = DirectTransfer(assembly, lambda span: True)
        else:
            assembly = AssemblyProcess(asked, slots=2, max_rows=8)
            transfer = SharedRing(assembly, lambda span: True, torch.device("cpu"))
        receipts.append(run(assembly, transfer, inbox, tmp_path / name))
        written.append(files(tmp_path / name))
        inbox.close()
    assert receipts[0] == receipts[1]
    assert written[0] == written[1]
    assert all(receipt.error is None and receipt.objects for receipt in receipts[0].values())
    assert {r.shape for r in receipts[0].values()} == {(L, n, H) for n in LENGTHS.values()}


class Slots:
    """Takes steps as the other process does, into one buffer, and keeps what it is told."""

    num_slots = 2

    def __init__(self, asked: AssemblySpec, max_rows: int) -> None:
        self.slot = Slot(0, np.zeros(slot_bytes(asked, max_rows), np.uint8), asked)
        self.told: list[tuple[list[Place], int, int]] = []
        self.free = threading.Semaphore(1)
        self.died = False

    def pin(self) -> None:
        pass

    def free_slot(self) -> Slot:
        self.free.acquire()
        if self.died:
            raise AssemblyDied("it ended")
        return self.slot

    def deliver(self, slot: Slot, places: list[Place], num_rows: int, kept_rows: int) -> None:
        assert slot is self.slot
        self.told.append((places, num_rows, kept_rows))


def one_step(*counts: int) -> Step:
    """A step with so many rows of each of several samples, whose keys are numbers."""
    stops = np.cumsum(counts).tolist()
    return Step(
        tuple(Span(f"{i}-12345678", 0, slice(stop - counts[i], stop)) for i, stop in enumerate(stops)),
        tuple(torch.randn(stops[-1], H) for _ in range(L)),
        torch.arange(stops[-1]),
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8))
def test_only_rows_that_are_kept_travel_and_each_comes_to_its_place(spans: list[tuple[int, bool]]) -> None:
    step = one_step(*(count for count, _ in spans))
    slots = Slots(spec_for("nobody"), len(step.input_ids))
    ring = SharedRing(cast(AssemblyProcess, slots), lambda span: spans[int(span.key)][1], torch.device("cpu"))
    ring.send(step)
    ring.close()
    ((places, num_rows, kept_rows),) = slots.told
    states_LNH, summary = slots.slot.views(num_rows, kept_rows)
    assert num_rows == len(step.input_ids)
    assert kept_rows == sum(count for count, kept in spans if kept)
    assert summary.input_ids_N.tolist() == list(range(num_rows))
    assert [rows is not None for _, rows in places] == [kept for _, kept in spans]
    for span, rows in places:
        if rows is not None:
            assert torch.equal(states_LNH[:, rows], torch.stack([rows_NH[span.rows] for rows_NH in step.states]))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that run everything at once, where there is no GPU."""
    nothing: Any = MagicMock()
    monkeypatch.setattr(torch.cuda, "Stream", nothing)
    monkeypatch.setattr(torch.cuda, "Event", nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def ring_of(slots: Slots, *, lent: bool = False) -> SharedRing:
    return SharedRing(cast(AssemblyProcess, slots), lambda span: True, torch.device("cuda", 0), lent=lent)


@pytest.mark.parametrize("lent", [False, True])
def test_the_engine_goes_on_while_steps_wait_for_a_buffer(streams: None, lent: bool) -> None:
    slots = Slots(spec_for("nobody"), 8)
    slots.free.acquire()
    ring, sent = ring_of(slots, lent=lent), [one_step(3, 2), one_step(4), one_step(8)]
    expected = [torch.stack(step.states) for step in sent]
    for step in sent[:2]:  # as many as there are buffers
        ring.send(step)
        step.input_ids.fill_(-1)  # as a runner does in its next step
        if lent:
            for rows_NH in step.states:
                rows_NH.fill_(torch.nan)
    third = threading.Thread(target=ring.send, args=(sent[2],))
    third.start()
    third.join(0.2)
    assert third.is_alive(), "nothing would bound what is held on the GPU"
    for number, states_LNH in enumerate(expected, 1):
        slots.free.release()
        eventually(lambda n=number: len(slots.told) == n or None)  # type: ignore[misc]
        there_LNH, summary = slots.slot.views(*slots.told[-1][1:])
        assert torch.equal(there_LNH, states_LNH)
        assert summary.input_ids_N.tolist() == list(range(states_LNH.shape[1]))
    third.join()
    ring.close()


def test_what_goes_wrong_on_the_way_stops_the_engine(streams: None) -> None:
    slots = Slots(spec_for("nobody"), 8)
    slots.died = True
    ring = ring_of(slots)
    ring.send(one_step(3))

    eventually(lambda: ring._error)
    with pytest.raises(RuntimeError, match="could not be copied to host memory: it ended"):
        ring.send(one_step(1))
    with pytest.raises(RuntimeError, match="it ended"):
        _ = ring.delivered
    ring.close()


def test_a_killed_process_is_told_to_whoever_needs_it(inbox: Inbox) -> None:
    asked = spec(inbox)
    process = AssemblyProcess(asked, slots=2, max_rows=8)
    inbox.accept()
    slots = [process.free_slot(), process.free_slot()]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(AssemblyDied, match="ended"):
        process.free_slot()  # the engine would wait here for a slot that nobody frees
    with pytest.raises(AssemblyDied):
        process.deliver(slots[0], [], 0, 0)
    with pytest.raises(AssemblyDied):
        _ = process.delivered
    with pytest.raises(ReceiptsLost, match="rank 0 ended"):
        eventually(lambda: inbox.take(["k"]))
    with pytest.raises(AssemblyDied):
        process.close()


def test_a_process_that_fails_says_why(inbox: Inbox) -> None:
    process = AssemblyProcess(spec(inbox), slots=2, max_rows=8)
    inbox.accept()
    process.free_slot(), process.free_slot()
    process._send("deliver", 7, [], 1, 1)  # there is no such slot
    with pytest.raises(AssemblyDied, match="IndexError"):
        process.free_slot()
    with pytest.raises(AssemblyDied):
        process.close()


def test_a_process_that_cannot_begin_does_not_keep_the_engine_waiting(inbox: Inbox) -> None:
    with pytest.raises(AssemblyDied, match="before it began"):
        AssemblyProcess(spec(inbox, stage="tasks.nowhere:stage"), slots=2, max_rows=8)


def test_settled_samples_are_taken_with_what_there_is(inbox: Inbox, tmp_path: Path) -> None:
    asked = spec(inbox)
    assembly = Assembly(asked)
    inbox.accept()
    keys = list(LENGTHS)
    assembly.expect([Wanted(key, n, str(tmp_path), 0) for key, n in LENGTHS.items()])
    transfer = DirectTransfer(assembly, lambda span: True)
    transfer.send(next(steps()))
    assert inbox.take(keys) is None, "one sample is not whole"
    assembly.settle(3, keys)
    found: Any = eventually(lambda: inbox.take(keys, 3))
    assert [found[key][0][0].error for key in keys] == [None, None, "only rows [0, 2) of 12 were computed"]
    inbox.expect_end()
    assembly.close()


def test_a_receipt_that_never_comes_is_not_waited_for_once_settled() -> None:
    inbox = Inbox(2)
    first, second = Outbox(inbox.address, 0), Outbox(inbox.address, 1)
    inbox.accept()
    first.settled(3)
    second.settled(2)
    assert inbox.take(["k"], 3) is None
    second.settled(3)
    assert inbox.take(["k"]) is None
    assert eventually(lambda: inbox.take(["k"], 3)) == {"k": []}
    inbox.expect_end()
    first.close()
    second.close()
    inbox.close()


def test_a_receipt_arrives_as_it_was_sent() -> None:
    receipt = Receipt(
        key="k",
        rank=1,
        world_size=2,
        shape=(2, 3, 4),
        dtype="float32",
        ids_digest="d",
        digests=("a", "b"),
        rms=(1.0, 2.0),
        nonfinite=(0, 0),
        zero_rows=(0, 0),
        objects={"c/0": (10, 7)},
    )
    digests_TL = np.arange(6, dtype=np.int64).reshape(3, 2)
    inbox = Inbox(2)
    outboxes = [Outbox(inbox.address, rank) for rank in (1, 0)]
    inbox.accept()
    for rank, outbox in zip((1, 0), outboxes, strict=True):
        outbox.receipt(replace(receipt, rank=rank), digests_TL)
    found: Any = eventually(lambda: inbox.take(["k"]))
    assert found == {"k": [(replace(receipt, rank=rank), digests_TL.tobytes()) for rank in (0, 1)]}, "by rank"
    assert inbox.take(["k"]) is None, "what was taken is forgotten"
    inbox.expect_end()
    for outbox in outboxes:
        outbox.close()
    inbox.close()


SHARED = 2 * small_chunks.TOKENS
FAMILY = "f" * 63


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layout, "chunk_tokens", small_chunks.few)
    layout._templates.cache_clear()
    yield
    layout._templates.cache_clear()


def failing(_directory: Path, key: str, *args: Any) -> dict[str, tuple[int, int]]:
    """As the store's, but the sample that computed a prefix for others cannot be staged."""
    if key.endswith("0"):
        eventually(lambda: "1" in WAITED_FOR)
        raise StagingFailure("the disk is full", lasting=True)
    return stage_states(_directory, key, *args)


WAITED_FOR: set[str] = set()


@pytest.mark.parametrize("stage", [STAGE, f"{__name__}:failing"])
def test_a_prefix_of_one_step_is_staged_once(few: None, inbox: Inbox, tmp_path: Path, stage: str) -> None:
    """A sample links to what another of the same step is about to stage; if nothing comes of it, it says so."""
    WAITED_FOR.clear()
    asked = spec(inbox, stage)
    stage_spec = asked.settings.stage_spec | {"links": str(tmp_path / "links")}
    assembly = Assembly(replace(asked, settings=replace(asked.settings, stage_spec=stage_spec, reuse_bytes=1 << 20)))
    inbox.accept()
    staged = assembly._prefixes.staged  # type: ignore[union-attr]
    staged._chunk = small_chunks.TOKENS
    find = staged.find

    def found(*args: Any) -> Any:
        rows = find(*args)
        assert len(rows) == 2, "they are promised, not staged yet"
        WAITED_FOR.add("1")
        return rows

    staged.find = found  # type: ignore[method-assign]
    prefix = torch.randn(L, SHARED, H, generator=RNG)
    own = torch.randn(L, 7, H, generator=RNG)
    ids = {f"{FAMILY}{i}": np.concatenate([np.arange(SHARED), [900 + i] * 7]).astype(np.int32) for i in (0, 1)}
    names = b"".join(prefix_names(np.arange(SHARED), 16))
    assembly.expect([Wanted(key, SHARED + 7, str(tmp_path / "staged"), 0, SHARED, names) for key in ids])
    states = torch.cat([prefix, own, own], dim=1)
    step_ids = torch.from_numpy(np.concatenate([ids[f"{FAMILY}0"], ids[f"{FAMILY}1"][SHARED:]]))
    spans = (
        Span(f"{FAMILY}1-12345678", SHARED, slice(SHARED + 7, SHARED + 14)),
        Span(f"{FAMILY}0-12345678", 0, slice(0, SHARED + 7)),
    )
    DirectTransfer(assembly, lambda span: True).send(Step(spans, tuple(states), step_ids))
    receipts = {key: found for key, ((found, _),) in eventually(lambda: inbox.take(list(ids))).items()}
    first, second = (receipts[f"{FAMILY}{i}"] for i in (0, 1))
    inbox.expect_end()
    assembly.close()
    if stage == STAGE:
        assert (first.error, second.error, second.reused) == (None, None, ((f"{FAMILY}0", SHARED),))
        assert second.changed_rows == (0,) * L
        files = [tmp_path / f"staged/{key}/hidden_states/c.{d}.{c}.0" for key in ids for d in range(L) for c in (0, 1)]
        assert len({file.stat().st_ino for file in files}) == len(files) / 2
    else:
        assert first.storage_failed == "lasting"
        assert second.rows_gone
        assert "could not be" in str(second.error)
