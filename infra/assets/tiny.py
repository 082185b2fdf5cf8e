"""Tiny checkpoints with random weights, in the layout of the published ones.

Weights are drawn so that hidden states are of the order of 1 and differ from layer to layer and from token to token:
what vLLM makes up itself leaves all depths equal bit for bit.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

VISION_LAYERS, VISION_SIZE = 2, 64

#: How many patches an image may have; small, as vLLM tries the largest image when it starts.
KIMI_PREPROCESSOR = {
    "image_processor_type": "KimiK25FusedVisionProcessor",
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 64,
        "patch_limit_on_one_side": 32,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": None,
        "fixed_output_tokens": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "timestamp_mode": "hh:mm:ss.fff",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values of a parameter, the same whenever its name and shape are."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))
    if name.endswith("bias"):
        return 0.02 * values
    if len(shape) == 1:  # the weights of a norm
        return 1 + 0.1 * values
    if "embed_tokens" in name:
        return values
    return values / math.sqrt(math.prod(shape[1:]) if "patch_embed" in name else shape[-1])


def write_kimi(path: Path, weights: Mapping[str, torch.Tensor], text: Mapping[str, Any], image_token: int) -> None:
    """Write a Kimi-K2.5 checkpoint around a DeepSeek-V3 language model.

    By hand, because Hugging Face's class reads the published layout but writes another, and the installed version may
    not know it.

    Args:
        path: directory, which exists.
        weights: of the language model, by the names they have in a checkpoint of its own.
        text: the language model's config.json.
        image_token: id that stands for an image.
    """
    dtype = next(iter(weights.values())).dtype
    named = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    shapes = kimi_vision_shapes(text["hidden_size"])
    named |= {name: draw(name, shape).to(dtype) for name, shape in shapes.items()}
    save_file(named, path / "model.safetensors", {"format": "pt"})
    ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in text}
    sizes = {"height": 8, "width": 8, "time": 4}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": str(dtype).removeprefix("torch."),
        "text_config": dict(text),
        # The position embedding and the projector have other names in vLLM's own class than in Hugging Face's.
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "num_attention_heads": 4,
            "num_hidden_layers": VISION_LAYERS,
            "hidden_size": VISION_SIZE,
            "intermediate_size": 2 * VISION_SIZE,
            **{f"pos_emb_{side}": size for side, size in sizes.items()},
            **{f"init_pos_emb_{side}": size for side, size in sizes.items()},
        },
        "projection_hidden_size": VISION_SIZE,
        "image_token_id": image_token,
        "media_placeholder_token_id": image_token,
        "tie_word_embeddings": False,
        **ids,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "preprocessor_config.json").write_text(json.dumps(KIMI_PREPROCESSOR))


def kimi_vision_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower's and the projector's weights."""
    size, merged, wide, patch = VISION_SIZE, 4 * VISION_SIZE, 2 * VISION_SIZE, 14
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (size, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (size,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, size),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (hidden_size, merged),
        "mm_projector.proj.2.bias": (hidden_size,),
    }
    linear = {"wqkv": (3 * size, size), "wo": (size, size), "mlp.fc0": (wide, size), "mlp.fc1": (size, wide)}
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for block in (f"vision_tower.encoder.blocks.{i}" for i in range(VISION_LAYERS)):
        norms += [f"{block}.norm0", f"{block}.norm1"]
        for name, (rows, columns) in linear.items():
            shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
    return shapes | {f"{norm}.{part}": (size,) for norm in norms for part in ("weight", "bias")}
