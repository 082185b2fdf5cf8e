"""Hugging Face's own forward, as the reference for what the engine captures.

It runs no code of a checkpoint's: an architecture that transformers does not know cannot be compared.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


@lru_cache(maxsize=1)
def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in ``model_dir``; the last one is kept.

    Raises:
        ValueError: weights of the checkpoint and of the model do not match, so that some would be random.
    """
    config = AutoConfig.from_pretrained(model_dir)
    auto = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
    model, loading = auto.from_pretrained(model_dir, dtype=dtype, output_loading_info=True)
    amiss = {what: names for what, names in loading.items() if names}
    if amiss:
        raise ValueError(f"{model_dir} does not hold what {type(model).__name__} needs: {amiss}")
    return model.eval()


def decoder(model: Any) -> Any:
    """The language model's stack: ``embed_tokens``, ``layers`` and the final ``norm``."""
    inner = model.model
    return getattr(inner, "language_model", inner)


@torch.inference_mode()
def residual_states(
    model_dir: Path, input_ids: npt.ArrayLike, depths: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The residual stream r_k of one sample at each of ``depths``.

    Read by hooks on the layers themselves: the last of Hugging Face's ``hidden_states`` is taken after the final
    norm, and so is no r_k.

    Returns:
        Tensor [L, T, H] of ``dtype``, in the order of ``depths``; r_0 is what the embedding puts out.
    """
    model = load(model_dir, dtype)
    stack = decoder(model)
    states: dict[int, torch.Tensor] = {}

    def keep(depth: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            states[depth] = (output if isinstance(output, torch.Tensor) else output[0])[0].clone()

        return hook

    sources = [stack.embed_tokens, *stack.layers]
    handles = [sources[depth].register_forward_hook(keep(depth)) for depth in set(depths)]
    try:
        ids = torch.tensor(np.asarray(input_ids, dtype=np.int64), device=model.device)
        stack(input_ids=ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([states[depth] for depth in depths])
