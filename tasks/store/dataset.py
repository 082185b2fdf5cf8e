"""A store as a PyTorch data set: map-style, with batches of samples of similar length."""

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from tasks.store import shared_memory
from tasks.store.reader import Reader


class Item(TypedDict):
    """One sample as the data set yields it."""

    hidden_states: torch.Tensor
    """[L, T, H]"""
    input_ids: torch.Tensor
    """[T] int64"""
    loss_mask: torch.Tensor
    """[T] bool"""
    key: str
    source_id: str | None


class Batch(TypedDict):
    """Samples padded to the longest of them: B samples, T its length."""

    hidden_states: torch.Tensor
    """[B, L, T, H], zero where padded"""
    input_ids: torch.Tensor
    """[B, T] int64, zero where padded"""
    loss_mask: torch.Tensor
    """[B, T] bool, false where padded"""
    lengths: torch.Tensor
    """[B] int64"""
    keys: list[str]
    source_ids: list[str | None]


class SampleDataset(Dataset[Item]):
    """The samples of a store, one an item; every read is checked (:class:`tasks.store.DamagedSample`).

    Works in DataLoader workers started by fork, forkserver or spawn, for local stores and object stores.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        depths: Sequence[int] | None = None,
        by: Literal["source", "key"] = "source",
    ) -> None:
        """Open a store.

        Args:
            url: Path or URL of the store.
            depths: The depths to yield, ascending; all by default.
            by: ``source``: an item for each conversation of the data, with its own loss mask, so that a sample that
                two of them share comes twice. ``key``: an item for each distinct sample.
        """
        self.reader = Reader(url)
        self.depths = None if depths is None else tuple(depths)
        if self.depths is not None:
            self.reader.check_depths(self.depths)
        self.names: Sequence[str] = self.reader.source_ids if by == "source" else self.reader.keys
        key_of = self.reader.key_of if by == "source" else str
        self.lengths = np.array([self.reader.num_tokens(key_of(name)) for name in self.names], dtype=np.int64)
        """[items], tokens of each; what the batch sampler needs."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Item:
        (item,) = self.__getitems__([index])
        return item

    def __getitems__(self, indices: Sequence[int]) -> "Rows":
        """The items of a batch, read into rows of the tensors that :func:`collate` returns."""
        reader = self.reader
        depths = reader.identity.depths if self.depths is None else self.depths
        shape = len(indices), len(depths), int(self.lengths[indices].max()), reader.spec.hidden_size
        states_BLTH = shared_memory.empty(shape, getattr(torch, reader.spec.dtype))
        bits_BLTH = states_BLTH.view(torch.uint8).numpy().view(reader.spec.given_dtype)
        items = []
        for row, index in enumerate(indices):
            end = self.lengths[index]
            if reader.spec.is_fp8:
                sample = reader.read(self.names[index], self.depths)
                states_BLTH[row, :, :end] = sample.hidden_states
            else:
                sample = reader.read(self.names[index], self.depths, bits_BLTH[row, :, :end])
            items.append(
                Item(
                    hidden_states=states_BLTH[row, :, :end],
                    input_ids=sample.input_ids,
                    loss_mask=sample.loss_mask,
                    key=sample.key,
                    source_id=sample.source_id,
                )
            )
        return Rows(items, states_BLTH)


class Rows(list[Item]):
    """Items whose states lie in the rows of one tensor; what lies beyond their ends there is not defined."""

    def __init__(self, items: Sequence[Item], states_BLTH: torch.Tensor) -> None:
        super().__init__(items)
        self._states_BLTH = states_BLTH
        self._given = [item["hidden_states"] for item in items]

    def __reduce__(self) -> tuple[type[list[Item]], tuple[list[Item]]]:
        return list, (list(self),)

    def whole(self) -> torch.Tensor | None:
        """[B, L, T, H], T the longest; None where the items are no longer those that were read."""
        states = [item["hidden_states"] for item in self]
        unchanged = len(states) == len(self._given) and all(map(operator.is_, states, self._given))
        fits = all(len(item["input_ids"]) == item["hidden_states"].shape[1] for item in self)
        return self._states_BLTH if unchanged and fits else None


class LengthBucketedBatches(Sampler[list[int]]):
    """Batches of items of similar length within a budget of tokens, padding included.

    Items are shuffled, cut into buckets, sorted by length within each, and batched; then the batches are shuffled.
    The order depends on the seed and the epoch alone. Every item comes once an epoch; with several ranks, the last
    batches are repeated where their number does not divide, so that all ranks take as many steps.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray[Any, Any],
        max_tokens: int,
        *,
        max_samples: int | None = None,
        bucket: int = 1024,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Plan batches.

        Args:
            lengths: [items], tokens of each (:attr:`SampleDataset.lengths`).
            max_tokens: Most tokens of a batch: its items times its longest item.
            max_samples: Most items of a batch.
            bucket: Items that are sorted together; more means less padding and less randomness.
            shuffle: Whether to shuffle.
            seed: Of the shuffling.
            rank: Which share of the batches this process takes.
            world_size: How many processes there are.

        Raises:
            ValueError: an item is longer than the budget.
        """
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if len(self._lengths) and self._lengths.max() > max_tokens:
            longest = int(self._lengths.argmax())
            raise ValueError(
                f"item {longest} has {self._lengths[longest]} tokens, more than max_tokens={max_tokens}; raise it"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._max_tokens, self._max_samples, self._bucket = max_tokens, max_samples, bucket
        self._shuffle, self._seed, self._rank, self._world_size = shuffle, seed, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        random = np.random.default_rng([self._seed, self.epoch])
        order = np.arange(len(self._lengths))
        if self._shuffle:
            random.shuffle(order)
        batches: list[list[int]] = []
        for start in range(0, len(order), self._bucket):
            items = order[start : start + self._bucket]
            batch: list[int] = []
            for item in items[np.argsort(self._lengths[items], kind="stable")].tolist():
                # Ascending, so the newest item is the longest.
                too_long = (len(batch) + 1) * self._lengths[item] > self._max_tokens
                if batch and (too_long or len(batch) == self._max_samples):
                    batches.append(batch)
                    batch = []
                batch.append(item)
            batches.append(batch)
        if self._shuffle:
            random.shuffle(batches)
        if batches:
            batches += [batches[i % len(batches)] for i in range(-len(batches) % self._world_size)]
        return batches[self._rank :: self._world_size]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())


def collate(items: Sequence[Item]) -> Batch:
    """Pad items to the longest; for ``DataLoader(collate_fn=...)``. Does not copy states that are read for it."""
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    size, longest = len(items), int(lengths.max())
    layers, _, hidden = items[0]["hidden_states"].shape
    whole = items.whole() if isinstance(items, Rows) else None
    if whole is None:
        hidden_states_BLTH = shared_memory.empty((size, layers, longest, hidden), items[0]["hidden_states"].dtype)
    else:
        hidden_states_BLTH = whole
    input_ids_BT = torch.zeros(size, longest, dtype=torch.int64)
    loss_mask_BT = torch.zeros(size, longest, dtype=torch.bool)
    for row, item in enumerate(items):
        end = len(item["input_ids"])
        if whole is None:
            hidden_states_BLTH[row, :, :end] = item["hidden_states"]
        hidden_states_BLTH[row, :, end:] = 0
        input_ids_BT[row, :end] = item["input_ids"]
        loss_mask_BT[row, :end] = item["loss_mask"]
    return Batch(
        hidden_states=hidden_states_BLTH,
        input_ids=input_ids_BT,
        loss_mask=loss_mask_BT,
        lengths=lengths,
        keys=[item["key"] for item in items],
        source_ids=[item["source_id"] for item in items],
    )
