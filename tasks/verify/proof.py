"""The value proof: r_L through the checkpoint's final norm and head must give the token that the engine sampled.

The weights are read from the checkpoint's safetensors files, one at a time; neither the engine nor Hugging Face's
model code has a part in it. Arithmetic is float32.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from tasks.model import Checkpoint, ModelError, final_norm
from tasks.vocabulary import Identity, Outcome, Proof

#: How far below the largest logit the sampled token's may lie, as a share of the largest magnitude of a logit.
#: An engine that computes in the type rounds the norm, the product and the logits; up to here that can turn a tie.
MARGIN = {"float32": 1e-4, "bfloat16": 0.02, "float8_e4m3": 0.1}

HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
EMBEDDING_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")

_FLOAT_ELEMENTS = 1 << 28  # a GiB
_VOCABULARY_AT_ONCE = 16_384  # rows of the head made float32 at a time


class Head:
    """Final norm and head of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        """Read the two weights.

        Raises:
            ModelError: the checkpoint has them under no name that is known, or quantized.
        """
        norm, self._eps = final_norm(checkpoint)
        self._device = device
        self._norm_H = torch.from_numpy(norm.copy()).to(device)
        text = checkpoint.config.get("text_config", checkpoint.config)
        tied = bool(text.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings", False)))
        weight = _tensor(checkpoint, HEAD_NAMES)
        if weight is None and tied:
            weight = _tensor(checkpoint, EMBEDDING_NAMES)
        if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
            raise ModelError(f"{checkpoint.path} has none of the tensors {HEAD_NAMES} in a plain type in *.safetensors")
        # A small head is converted once, a large one by blocks whenever it is used.
        self._weight_VH = weight.to(device, torch.float32 if weight.numel() <= _FLOAT_ELEMENTS else weight.dtype)

    @torch.inference_mode()
    def logits(self, states_NH: torch.Tensor, *, normed: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of states of the last depth, a block of the vocabulary at a time: (first token id, [N, block]).

        Args:
            states_NH: [N, H], rows of r_L.
            normed: they went through the final norm already.
        """
        normed_NH = states_NH.to(self._device, torch.float32)
        if not normed:
            scale_N1 = torch.rsqrt(normed_NH.square().mean(dim=1, keepdim=True) + self._eps)
            normed_NH = normed_NH * scale_N1 * self._norm_H
        for start in range(0, self._weight_VH.shape[0], _VOCABULARY_AT_ONCE):
            block_vH = self._weight_VH[start : start + _VOCABULARY_AT_ONCE].float()
            yield start, normed_NH @ block_vH.T

    def prove(
        self, states_NH: torch.Tensor, sampled: Sequence[int], margin: float, *, normed: bool = False
    ) -> list[Proof]:
        """Compare tokens with the most likely ones after each row.

        Args:
            states_NH: [N, H], rows of r_L.
            sampled: the token that the engine sampled greedily after each, or any other to compare with.
            margin: see :data:`MARGIN`.
            normed: see :meth:`logits`.
        """
        tokens, best, chosen, scale = self._best(states_NH, np.asarray(sampled, dtype=np.int64), normed)
        proofs = []
        for i, token in enumerate(sampled):
            gap, limit = float(best[i] - chosen[i]), margin * float(scale[i])
            outcome: Outcome = "failed"
            if int(tokens[i]) == token:
                outcome = "proved"
            elif gap <= limit:
                outcome = "near tie"
            proofs.append(Proof(outcome, int(token), int(tokens[i]), gap, limit))
        return proofs

    def _best(
        self, states_NH: torch.Tensor, sampled: npt.NDArray[np.int64], normed: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Most likely token, its logit, the logit of the sampled one and the largest magnitude; each [N]."""
        num_rows = states_NH.shape[0]
        tokens = np.zeros(num_rows, dtype=np.int64)
        best = np.full(num_rows, -np.inf, dtype=np.float32)
        chosen = np.full(num_rows, -np.inf, dtype=np.float32)
        scale = np.zeros(num_rows, dtype=np.float32)
        for start, logits_Nv in self.logits(states_NH, normed=normed):
            values, indices = (t.cpu().numpy() for t in logits_Nv.max(dim=1))
            larger = values > best
            tokens[larger], best[larger] = indices[larger] + start, values[larger]
            scale = np.maximum(scale, logits_Nv.abs().amax(dim=1).cpu().numpy())
            here = np.flatnonzero((sampled >= start) & (sampled < start + logits_Nv.shape[1]))
            chosen[here] = logits_Nv.cpu().numpy()[here, sampled[here] - start]
        return tokens, best, chosen, scale


def margin(identity: Identity) -> float:
    """The margin for states of this identity, see :data:`MARGIN`."""
    return MARGIN[identity.dtype if identity.stored_as == "exact" else identity.stored_as]


def has_last_depth(identity: Identity) -> bool:
    """Whether r_L is captured, without which no token can be proved."""
    return identity.depths[-1] == identity.num_layers


def _tensor(checkpoint: Checkpoint, names: Sequence[str]) -> torch.Tensor | None:
    for path in sorted(checkpoint.path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in names:
                    return tensors.get_tensor(name)  # type: ignore[no-any-return]
    return None
