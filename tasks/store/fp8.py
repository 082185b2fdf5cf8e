"""float8_e4m3 storage: 8 bits an element, a scale per token and depth, and the error it makes, measured."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tasks.store.layout import StateSpec, Tile

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


class Quantizer:
    """Quantizes a sample chunk by chunk, possibly from several threads, and measures the error."""

    def __init__(self, spec: StateSpec, num_tokens: int) -> None:
        self._is_float32 = spec.dtype == "float32"
        self.scales_LT: npt.NDArray[np.float32] = np.empty((spec.num_depths, num_tokens), dtype="<f4")
        self._errors_LT: npt.NDArray[np.float32] = np.empty((spec.num_depths, num_tokens), dtype="<f4")

    def __call__(self, states_ltH: npt.NDArray[Any], tile: Tile) -> npt.NDArray[np.uint8]:
        """Bits of a chunk's states, uint8 [l, t, H]."""
        import torch

        states = torch.from_numpy(np.ascontiguousarray(states_ltH))
        computed_ltH = states if self._is_float32 else states.view(torch.bfloat16).float()
        peak_lt = computed_ltH.abs().amax(dim=-1)
        scale_lt = (peak_lt / FP8_MAX).clamp_min(2.0**-126)  # no denormal or zero to divide by
        bits_ltH = (computed_ltH / scale_lt[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        difference_ltH = bits_ltH.float().mul_(scale_lt[..., None]).sub_(computed_ltH)
        norm_lt = computed_ltH.norm(dim=-1)
        error_lt = difference_ltH.norm(dim=-1) / torch.where(norm_lt > 0, norm_lt, 1.0)
        self.scales_LT[tile.depths, tile.tokens] = scale_lt.numpy()
        self._errors_LT[tile.depths, tile.tokens] = error_lt.numpy()
        return bits_ltH.view(torch.uint8).numpy()

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
