"""One sample as a trainer's file holds it.

Letters in shapes: A auxiliary depths, T tokens of the sample, H hidden size.
"""

from dataclasses import dataclass

import torch

from tasks.handoff.errors import UnreadableSample


@dataclass(frozen=True, eq=False)
class Example:
    """Row t of everything belongs to token t; no format shifts its rows, trainers do."""

    source_id: str
    """Id of the conversation; never part of a path."""
    key: str
    input_ids_T: torch.Tensor
    """int64"""
    loss_mask_T: torch.Tensor
    """int64, 1 where a trainer supervises the token."""
    states_LTH: torch.Tensor
    """[A + 1, T, H] bfloat16 or float32: the auxiliary depths, ascending, and the final state."""
    is_normed: bool = False
    """Whether the final state is taken after the model's final norm."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @property
    def aux_TAH(self) -> torch.Tensor:
        """[T, A * H], the auxiliary states of a token one after the other, in memory of its own."""
        return self.states_LTH[:-1].transpose(0, 1).flatten(1).contiguous()

    @property
    def final_TH(self) -> torch.Tensor:
        """[T, H], in memory of its own, since torch.save would write all that a view belongs to."""
        return self.states_LTH[-1].clone()


def stack(aux_TAH: torch.Tensor, final_TH: torch.Tensor) -> torch.Tensor:
    """The inverse: [A + 1, T, H] from [T, A * H] and [T, H].

    Raises:
        UnreadableSample: the two do not belong together.
    """
    num_tokens, hidden_size = final_TH.shape
    if aux_TAH.shape[0] != num_tokens or aux_TAH.shape[1] % hidden_size:
        raise UnreadableSample(
            "shape", f"auxiliary states {list(aux_TAH.shape)} beside final states {list(final_TH.shape)}"
        )
    if aux_TAH.dtype != final_TH.dtype:
        raise UnreadableSample("dtype", f"auxiliary states are {aux_TAH.dtype}, final states {final_TH.dtype}")
    return torch.cat([aux_TAH.reshape(num_tokens, -1, hidden_size).transpose(0, 1), final_TH[None]])
