"""A store as the trainer of an EAGLE-3 draft model reads it, without a copy in between.

Letters in shapes: A auxiliary depths, T tokens of one sample, H hidden size.
"""

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

import torch
from torch.utils.data import Dataset

from tasks.store.backend import open_files
from tasks.store.dataset import SampleDataset
from tasks.store.final_norm import FinalNorm
from tasks.store.root import stored_identity


class EagleItem(TypedDict):
    """One sample under the names that speculators' trainer uses."""

    hidden_states: torch.Tensor
    """[T, A * H], the auxiliary states of each token side by side, in ascending depth"""
    verifier_last_hidden_states: torch.Tensor
    """[T, H]"""
    input_ids: torch.Tensor
    """[T] int64"""
    loss_mask: torch.Tensor
    """[T] int64, 1 where the token is supervised"""
    position_ids: torch.Tensor
    """[T] int64, from 0"""
    lengths: torch.Tensor
    """[1] int64, T"""


class EagleDataset(Dataset[EagleItem]):
    """The samples of a store for an EAGLE-3 trainer; every read is checked.

    Rows are not shifted: row t of every tensor belongs to token t, as trainers expect that shift them themselves
    (speculators, SpecForge and Model-Optimizer all do). :func:`shift` is that shift, for one that does not.

    Works in DataLoader workers started by fork, forkserver or spawn, for local stores and object stores. An instance
    can stand in for speculators' own data set: it has the attributes that its loaders ask for.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        aux_depths: Sequence[int],
        *,
        normed: bool = False,
        dtype: torch.dtype | None = None,
        by: Literal["source", "key"] = "source",
    ) -> None:
        """Open a store.

        Args:
            url: Path or URL of the store.
            aux_depths: The auxiliary depths, ascending; r_k for speculators' target layer id k.
            normed: Yield the last state after the model's final norm, instead of r_L.
            dtype: Element type of the states; the store's own where absent.
            by: as :class:`tasks.store.dataset.SampleDataset`.

        Raises:
            ValueError: the store lacks one of the depths, r_L or the final norm.
        """
        with_last = [*aux_depths, stored_identity(open_files(url)).num_layers]
        self.samples = SampleDataset(url, depths=with_last, by=by)
        reader = self.samples.reader
        if reader.identity.last_is_normed and not normed:
            raise ValueError("the store's last states were imported after the final norm: ask for normed=True")
        self._norm: FinalNorm | None = None
        if normed and not reader.identity.last_is_normed:
            self._norm = reader.final_norm
            if self._norm is None:
                raise ValueError("the store does not hold the final norm")
        self.hidden_states_dtype = dtype or getattr(torch, reader.identity.dtype)
        self.approx_lengths: list[int] = self.samples.lengths.tolist()
        """Tokens of each item, for batch samplers."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> EagleItem:
        item = self.samples[index]
        states_LTH, num_tokens = item["hidden_states"], len(item["input_ids"])
        last_TH = states_LTH[-1] if self._norm is None else self._norm.apply(states_LTH[-1])
        return EagleItem(
            hidden_states=states_LTH[:-1].transpose(0, 1).flatten(1).to(self.hidden_states_dtype),
            verifier_last_hidden_states=last_TH.to(self.hidden_states_dtype),
            input_ids=item["input_ids"],
            loss_mask=item["loss_mask"].long(),
            position_ids=torch.arange(num_tokens),
            lengths=torch.tensor([num_tokens]),
        )


def shift(item: EagleItem) -> EagleItem:
    """Align what an EAGLE-3 draft is given with what it has to predict; one row less, none of a 1-token sample.

    Row t then has the auxiliary states of token t, the id of token t + 1 and its position, and the target's last
    state at token t + 1, whose most likely next token the draft is to predict; supervised where token t + 1 is.
    """
    return EagleItem(
        hidden_states=item["hidden_states"][:-1],
        verifier_last_hidden_states=item["verifier_last_hidden_states"][1:],
        input_ids=item["input_ids"][1:],
        loss_mask=item["loss_mask"][1:],
        position_ids=item["position_ids"][1:],
        lengths=(item["lengths"] - 1).clamp(min=0),
    )
