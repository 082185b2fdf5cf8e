"""The model's norm after its last layer, kept with the store so that readers can apply it to r_L."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tasks.store import layout
from tasks.store.backend import Files
from tasks.store.errors import DamagedStore
from tasks.store.layout import RECORD

if TYPE_CHECKING:
    import torch

WEIGHT = "final_norm_weight"

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


def weight_documents(weight: npt.NDArray[np.float32]) -> dict[str, bytes]:
    """Files of the weight's array, by path relative to the store."""
    documents = layout.array_documents(np.asarray(weight, dtype=np.float32), ["hidden"], {})
    return {f"{WEIGHT}/{path}": data for path, data in documents.items()}


def load_final_norm(files: Files, attributes: Mapping[str, Any]) -> FinalNorm | None:
    """The norm of a store with these attributes of its root group; None where it was not given one.

    Raises:
        DamagedStore: the weight's values are missing or altered.
    """
    norm = attributes.get("final_norm")
    if norm is None:
        return None
    path = f"{WEIGHT}/c.0"
    (data,) = files.read_all([path])
    size = 4 * attributes["identity"]["hidden_size"] + layout.CRC_BYTES
    if data is None or len(data) != size or layout.seal(content := data[: -layout.CRC_BYTES]) != data:
        raise DamagedStore(f"{files.url}: {_problem(path, data)}")
    return FinalNorm(np.frombuffer(content, dtype="<f4"), norm["eps"], norm["kind"])


def final_norm_problem(files: Files, attributes: Mapping[str, Any]) -> str | None:
    """What is wrong with the files of the norm's weight; None where nothing is."""
    try:
        norm = load_final_norm(files, attributes)
    except DamagedStore as error:
        return str(error).removeprefix(f"{files.url}: ")
    if norm is None:
        return None
    path = f"{WEIGHT}/{RECORD}"
    (document,) = files.read_all([path])
    try:
        # Compared as content, since another version of zarr may have written it.
        if json.loads(document or b"") == json.loads(weight_documents(norm.weight)[path]):
            return None
    except ValueError:
        pass
    return _problem(path, document)


def _problem(path: str, data: bytes | None) -> str:
    """What is wrong with a file, as a sentence that says what mends it."""
    what = "is missing" if data is None else "is not what was written"
    return f"{path} {what}; the next run that extracts into this store writes it again, from the checkpoint"
