"""Checkpoints for the tests: tiny ones with random weights, and SmolLM2.

The tiny ones are what Hugging Face's own classes make of a small configuration, with weights drawn anew so that
hidden states are of the order of 1 and differ from layer to layer and from token to token. They come out the same
on every machine, and are kept in the user's cache directory.
"""

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Kimi_K25Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infra.assets.cache import cached, made_by
from infra.assets.smollm2 import smollm2

#: Of the byte-level tokenizer: 256 bytes, then these; the rest of the vocabulary is never used.
SPECIAL_TOKENS = ("[BOS]", "[EOS]", "[PAD]", "<|im_start|>", "<|im_end|>", "<|media_pad|>")
VOCAB_SIZE = 320
MAX_POSITIONS = 4096

DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}

#: MLA and MoE as in DeepSeek-V3 and Kimi-K2, small. The latent's rank and the rotary part are of the real size, since
#: vLLM's CPU kernel knows no other, and yarn is what both models use.
LATENT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

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

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}
{%- for call in message.get('tool_calls') or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor -%}
<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def checkpoint_path(name: str, tensor_parallel_size: int = 1) -> Path:
    """Directory of a checkpoint with float32 weights.

    Args:
        name: ``llama``, ``qwen3``, ``deepseek``, ``kimi`` (tiny, 6 layers) or ``smollm2`` (trained, 30 layers).
        tensor_parallel_size: 1, 2 or 4; the heads of the checkpoint can be divided by it.
    """
    if name == "smollm2":
        return smollm2(kv_heads=3 if tensor_parallel_size == 1 else 4)
    return cached(f"tiny-{name}", made_by(name, Path(__file__)), partial(_write, name))


def _write(name: str, path: Path) -> None:
    tokenizer = byte_tokenizer()
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**DENSE, **ids)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DENSE, **ids)),
        "deepseek": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT, **ids)),
        "kimi": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT, **ids)),
    }[name]()
    for parameter, tensor in model.state_dict().items():
        tensor.copy_(draw(parameter, tuple(tensor.shape)))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if name == "kimi":
        _make_kimi(path, model.config, ids)


def _make_kimi(path: Path, text_config: DeepseekV3Config, ids: dict[str, Any]) -> None:
    """Turn the DeepSeek checkpoint at ``path`` into the language model inside a Kimi-K2.5 checkpoint.

    Written by hand because Hugging Face's class reads the published layout but writes another.
    """
    weights = load_file(path / "model.safetensors")
    weights = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    weights |= {name: draw(name, shape) for name, shape in kimi_vision_shapes().items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = Kimi_K25Config(
        text_config=text_config,
        vision_config={
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 4,
            "num_hidden_layers": VISION_LAYERS,
            "hidden_size": VISION_SIZE,
            "intermediate_size": 2 * VISION_SIZE,
        },
        projection_hidden_size=VISION_SIZE,
        image_token_id=256 + SPECIAL_TOKENS.index("<|media_pad|>"),
        tie_word_embeddings=False,
        architectures=["KimiK25ForConditionalGeneration"],  # the name that the published checkpoint has
        dtype="float32",
        **ids,
    )
    config.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(KIMI_PREPROCESSOR))


def kimi_vision_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower's and the projector's weights."""
    size, merged, wide, patch = VISION_SIZE, 4 * VISION_SIZE, 2 * VISION_SIZE, 14
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (size, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (size,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, size),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (LATENT["hidden_size"], merged),
        "mm_projector.proj.2.bias": (LATENT["hidden_size"],),
    }
    linear = {"wqkv": (3 * size, size), "wo": (size, size), "mlp.fc0": (wide, size), "mlp.fc1": (size, wide)}
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for block in (f"vision_tower.encoder.blocks.{i}" for i in range(VISION_LAYERS)):
        norms += [f"{block}.norm0", f"{block}.norm1"]
        for name, (rows, columns) in linear.items():
            shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
    return shapes | {f"{norm}.{part}": (size,) for norm in norms for part in ("weight", "bias")}


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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, so that any text can be tokenized; with a chat template that marks the assistant's turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="[BOS]",
        eos_token="[EOS]",
        pad_token="[PAD]",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )
