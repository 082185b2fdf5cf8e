"""Memory that workers use again: nothing that is still held anywhere is ever written over."""

import os
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from tasks.store import DamagedSample, Store, shared_memory
from tasks.store.dataset import Batch, SampleDataset, collate
from tests.store.samples import fill, identity, make


@pytest.fixture(autouse=True)
def as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_memory, "get_worker_info", object)
    monkeypatch.setattr(shared_memory, "_blocks", [])
    yield
    ForkingPickler.register(torch.Tensor, reduce_tensor)


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """What the other process gets, but for the trip of the block itself."""
    rebuild, arguments = shared_memory._reduce(tensor)
    received: torch.Tensor = rebuild(*arguments)
    return received


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.integers(1, 9000)),
        st.tuples(st.sampled_from(["send", "cut", "drop"]), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_what_is_held_never_changes(steps: list[tuple[str, int]]) -> None:
    shared_memory._blocks = []
    held: list[tuple[torch.Tensor, int]] = []
    for number, (step, value) in enumerate(steps):
        if step == "make":
            held.append((shared_memory.empty((value,), torch.int16).fill_(number), number))
        elif held:
            tensor, content = held[value % len(held)]
            if step == "drop":
                held.pop(value % len(held))
            elif step == "send":
                held.append((sent(tensor), content))
            else:
                held.append((tensor[len(tensor) // 2 :], content))
            del tensor
        assert all(bool((tensor == content).all()) for tensor, content in held)
    in_use = len(held)
    held.clear()
    shared_memory.empty((1,), torch.int16)
    assert len(shared_memory._blocks) <= max(in_use, shared_memory._SPARE) + 1


def test_a_block_is_used_again_once_nothing_in_it_is_left() -> None:
    made = shared_memory.empty((3, 1000), torch.bfloat16)
    address = made.data_ptr()
    received = sent(made[1:, 5:])
    assert torch.equal(received.view(torch.int16), made[1:, 5:].view(torch.int16))
    array = received.view(torch.int16).numpy()
    del made, received
    assert shared_memory.empty((3, 1000), torch.bfloat16).data_ptr() != address
    del array
    assert address in {shared_memory.empty((3, 1000), torch.bfloat16).data_ptr() for _ in range(2)}


def test_a_sample_sent_too_often_for_the_flags_is_copied() -> None:
    made = shared_memory.empty((10,), torch.bfloat16)
    made.fill_(1)
    for _ in range(shared_memory._HEADER_BYTES - 1):
        assert shared_memory._reduce(made)[0] is shared_memory._receive
    assert shared_memory._reduce(made)[0] is not shared_memory._receive


def test_what_another_process_may_have_inherited_is_left_alone() -> None:
    made = shared_memory.empty((10,), torch.bfloat16)
    (block,) = shared_memory._blocks
    received = sent(made)
    del made
    if not (child := os.fork()):
        del received
        os._exit(block.state)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == shared_memory._HELD
    del received
    assert block.state == shared_memory._ABANDONED
    shared_memory.empty((10,), torch.bfloat16)
    assert block not in shared_memory._blocks


class Watched(SampleDataset):
    """Says beside each batch how many blocks its worker has."""

    def __getitems__(self, indices: Any) -> Any:
        items = super().__getitems__(indices)
        items[0]["blocks"] = len(shared_memory._blocks)  # type: ignore[typeddict-unknown-key]
        return items


def watched(items: Any) -> tuple[int, Batch]:
    return items[0]["blocks"], collate(items)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_epochs_with_some_batches_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    monkeypatch.setattr(shared_memory, "get_worker_info", torch.utils.data.get_worker_info)
    samples = {s.key: s for s in (make(identity(), n, seed=n) for n in (5, 600, 7, 513, 30, 64, 9, 300))}
    with Store.open(tmp_path, identity()) as store:
        fill(store, list(samples.values()))
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", strategy)
    loader = DataLoader(Watched(tmp_path), 2, collate_fn=watched, num_workers=1, persistent_workers=True, timeout=120)
    kept, ids, blocks = [], [], []
    for epoch in range(6):
        for step, (count, batch) in enumerate(loader):
            ids.append(batch["input_ids"])  # which must not keep the states in use
            blocks.append(count)
            if step == epoch % 4:
                kept.append(batch)
            assert len(shared_memory._mapped) <= shared_memory._MAPPED
    assert max(blocks) <= len(kept) + 6
    assert len(ids) == 24
    for batch in kept:
        for row, key in enumerate(batch["keys"]):
            length = int(batch["lengths"][row])
            states = batch["hidden_states"][row]
            np.testing.assert_array_equal(states[:, :length].view(torch.uint16), samples[key].states)
            assert not states[:, length:].any()
    del loader, batch, states
    assert shared_memory._mapped
    kept.clear()
    assert not shared_memory._mapped


def test_collate_takes_the_items_as_they_are(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity()) as store:
        fill(store, [make(identity(), n) for n in (5, 300)])
    data = SampleDataset(tmp_path)
    rows = data.__getitems__([0, 1])
    one_by_one = collate([data[0], data[1]])
    in_place = collate(rows)
    assert in_place["hidden_states"][1].data_ptr() == rows[1]["hidden_states"].data_ptr()
    assert torch.equal(in_place["hidden_states"], one_by_one["hidden_states"])
    changed = data.__getitems__([0, 1])
    changed[0]["hidden_states"] = changed[0]["hidden_states"] * 2
    assert torch.equal(collate(changed)["hidden_states"][0], one_by_one["hidden_states"][0] * 2)
    shorter = data.__getitems__([0, 1])
    assert torch.equal(collate([shorter[1]])["hidden_states"], one_by_one["hidden_states"][1:])
    shorter.pop()
    assert torch.equal(collate(shorter)["hidden_states"], one_by_one["hidden_states"][:1, :, :5])


def test_a_length_that_the_manifest_has_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = make(identity(), 5)
    with Store.open(tmp_path, identity()) as store:
        fill(store, [sample])
    data = SampleDataset(tmp_path)
    with pytest.raises(ValueError, match=r"the states are \[4, 5, 32\] uint16, `out` is \[4, 6, 32\] uint16"):
        data.reader.read(0, out=np.empty((4, 6, 32), dtype=np.uint16))
    monkeypatch.setitem(data.reader._entries, sample.key, data.reader._entries[sample.key]._replace(num_tokens=6))
    with pytest.raises(DamagedSample, match="it has 5 tokens, and 6 in the manifest"):
        data[0]
