"""How far stored states may lie from states that were computed another way, and how far they do.

The error of a row is the Euclidean norm of the difference over that of the reference row, so that massive
activations count by their share. Tolerances are for the median row and for the worst one; the worst may be far off in
bfloat16, where a router of experts can flip.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest relative error of a row."""

    median: float
    worst: float


TOLERANCES = {
    "float32": Tolerance(median=1e-4, worst=1e-3),
    "bfloat16": Tolerance(median=0.05, worst=0.25),
    "float8_e4m3": Tolerance(median=0.08, worst=0.3),
}


@dataclass(frozen=True)
class Parity:
    """One sample's states at one depth against the reference."""

    depth: int
    median_error: float
    worst_error: float
    worst_row: int
    cosine: float
    """Smallest cosine between a stored row and its reference."""

    def within(self, tolerance: Tolerance) -> bool:
        """NaN is not."""
        return self.median_error <= tolerance.median and self.worst_error <= tolerance.worst

    def __str__(self) -> str:
        return (
            f"r_{self.depth}: relative error {self.median_error:.2g} (median row), {self.worst_error:.2g} (worst, row "
            f"{self.worst_row}), cosine {self.cosine:.6f}"
        )


def compare(stored_TH: torch.Tensor, reference_TH: torch.Tensor, depth: int) -> Parity:
    """Compare the states of one depth, both float32 [T, H]."""
    error_T = (stored_TH - reference_TH).norm(dim=1) / reference_TH.norm(dim=1).clamp_min(1e-30)
    cosine_T = torch.nn.functional.cosine_similarity(stored_TH.double(), reference_TH.double(), dim=1)
    worst = int(torch.nan_to_num(error_T, nan=torch.inf).argmax())
    return Parity(depth, float(error_T.median()), float(error_T[worst]), worst, float(cosine_T.min()))
