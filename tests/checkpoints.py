"""Checkpoints for the tests: tiny ones with random weights, and SmolLM2.

The tiny ones are what Hugging Face's own classes make of a small configuration, with weights drawn anew so that
hidden states are of the order of 1 and differ from layer to layer and from token to token. They come out the same
on every machine, and are kept in the user's cache directory.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infra.assets import tiny
from infra.assets.cache import cached, made_by
from infra.assets.smollm2 import smollm2
from infra.assets.tiny import draw, write_kimi

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
    return cached(f"tiny-{name}", made_by(name, Path(__file__), Path(tiny.__file__)), partial(_write, name))


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
        text = json.loads((path / "config.json").read_text())
        write_kimi(path, load_file(path / "model.safetensors"), text, 256 + SPECIAL_TOKENS.index("<|media_pad|>"))


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
