"""The model's norm after its last layer, kept with the store so that readers can apply it to r_L."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_RMS_TOLERANCE = 0.02


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """An RMS norm."""

    weight: npt.NDArray[np.float32]
    """[H]"""
    eps: float
    kind: str = "rms"

    def apply(self, states_TH: "torch.Tensor") -> "torch.Tensor":
        """The norm's output, in the type of the states.

        As Hugging Face computes it: normalized in float32, rounded to the type, then multiplied by the weight in it.

        Raises:
            ValueError: the norm is of a kind that is not known.
        """
        import torch

        if self.kind != "rms":
            raise ValueError(f"the store's final norm is of kind {self.kind!r}; only `rms` can be applied")
        values_TH = states_TH.float()
        normalized_TH = values_TH * torch.rsqrt(values_TH.square().mean(dim=-1, keepdim=True) + self.eps)
        return torch.tensor(self.weight, dtype=states_TH.dtype) * normalized_TH.to(states_TH.dtype)

    def normed_rows(self, states_TH: "torch.Tensor") -> int:
        """How many rows look like its output: divided by the weight, their root mean square is 1."""
        import torch

        weight_H = torch.tensor(self.weight)
        used_H = weight_H.abs() > 1e-3 * weight_H.abs().max()
        rms_T = (states_TH.float()[:, used_H] / weight_H[used_H]).square().mean(dim=-1).sqrt()
        return int((rms_T - 1).abs().lt(_RMS_TOLERANCE).sum())
