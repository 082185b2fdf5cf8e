"""float8_e4m3 storage: 8 bits an element, a scale per token and depth, and the error it makes, measured."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tasks.store.layout import StateSpec

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


class Quantizer:
    """Quantizes a sample chunk by chunk, possibly from several threads, and measures the error."""

    def __init__(self, spec: StateSpec, num_tokens: int) -> None:
        self._chunk_tokens = spec.chunk_tokens
        self._is_float32 = spec.dtype == "float32"
        self.scales_LT: npt.NDArray[np.float32] = np.empty((spec.num_depths, num_tokens), dtype="<f4")
        self._errors_LT: npt.NDArray[np.float32] = np.empty((spec.num_depths, num_tokens), dtype="<f4")

    def __call__(self, states_LtH: npt.NDArray[Any], j: int) -> npt.NDArray[np.uint8]:
        """Bits of the chunk at position j of the grid, as uint8 [L, t, H]."""
        import torch

        states = torch.from_numpy(np.ascontiguousarray(states_LtH))
        computed_LtH = states if self._is_float32 else states.view(torch.bfloat16).float()
        peak_Lt = computed_LtH.abs().amax(dim=-1)
        scale_Lt = (peak_Lt / FP8_MAX).clamp_min(2.0**-126)  # no denormal or zero to divide by
        bits_LtH = (computed_LtH / scale_Lt[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        difference_LtH = bits_LtH.float().mul_(scale_Lt[..., None]).sub_(computed_LtH)
        norm_Lt = computed_LtH.norm(dim=-1)
        error_Lt = difference_LtH.norm(dim=-1) / torch.where(norm_Lt > 0, norm_Lt, 1.0)
        rows = slice(j * self._chunk_tokens, j * self._chunk_tokens + states_LtH.shape[1])
        self.scales_LT[:, rows] = scale_Lt.numpy()
        self._errors_LT[:, rows] = error_Lt.numpy()
        return bits_LtH.view(torch.uint8).numpy()

    @property
    def error_L2(self) -> npt.NDArray[np.float32]:
        """[L, 2]: relative error of a row, the mean over all rows and the worst."""
        return np.stack([self._errors_LT.mean(axis=1), self._errors_LT.max(axis=1)], axis=1).astype("<f4")


def dequantize(bits_LTH: npt.NDArray[np.uint8], scales_LT: npt.NDArray[np.float32], dtype: str) -> "torch.Tensor":
    """[L, T, H] in the type the states were computed in."""
    import torch

    values_LTH = torch.from_numpy(bits_LTH).view(torch.float8_e4m3fn).float()
    values_LTH.mul_(torch.from_numpy(scales_LT)[..., None])
    return values_LTH if dtype == "float32" else values_LTH.bfloat16()
