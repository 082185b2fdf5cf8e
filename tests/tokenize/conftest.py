"""A small tokenizer with a ChatML template, made here; and checkpoints of known families, fetched once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks.model import Checkpoint
from tasks.tokenize.config import Data
from tasks.tokenize.encode import Encoded, RowEncoder
from tasks.tokenize.errors import BadRow
from tasks.tokenize.rows import parse
from tasks.vocabulary import Identity

CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TEXTS = [
    "Hello, how are you? I am fine, thank you. What is the weather like today in Paris?",
    "user assistant system tool The quick brown fox jumps over the lazy dog. 0123456789",
    'Probe question answer one two three Grüße, 你好 مرحبا \U0001f469‍\U0001f467 {}[]":,',
]

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def toy_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture(scope="session")
def make_checkpoint(toy_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Writes a directory with the toy tokenizer and a chat template."""

    def make(template: str | None = CHATML, **config: Any) -> Path:
        directory = tmp_path_factory.mktemp("checkpoint")
        toy_tokenizer.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        return directory

    return make


@pytest.fixture(scope="session")
def chatml(make_checkpoint: Maker) -> Path:
    return make_checkpoint()


@pytest.fixture(scope="session")
def identity() -> Identity:
    return Identity("fingerprint", "LlamaForCausalLM", 4, 8, (1, 2), "input", (1, 2), "bfloat16")


def checkpoint(directory: Path, vocab_size: int = 1000) -> Checkpoint:
    return Checkpoint(
        path=directory,
        fingerprint="fingerprint",
        architecture="LlamaForCausalLM",
        num_layers=4,
        hidden_size=8,
        vocab_size=vocab_size,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=None,
        config={},
    )


def encoder(directory: Path, vocab_size: int = 10**6, trust_remote_code: bool = False, **data: Any) -> RowEncoder:
    return RowEncoder(directory, vocab_size, Data(path=Path("chats.jsonl"), **data), trust_remote_code)


def encode(rows: RowEncoder, row: dict[str, Any]) -> Encoded:
    """The row's tokens; raises what is wrong with it."""
    (encoded,) = rows.encode([parse(row, Data(path=Path("chats.jsonl")).all_sources[0].columns, "chats.jsonl:1")])
    if isinstance(encoded, BadRow):
        raise encoded
    return encoded


def chat(*turns: str, first: str = "user") -> dict[str, Any]:
    """A row whose turns alternate between user and assistant."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return {"id": "c", "messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def supervised(rows: RowEncoder, encoded: Encoded) -> list[str]:
    """The text of each stretch of supervised tokens."""
    stretches: list[list[int]] = []
    before = False
    for token, flag in zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True):
        if flag:
            if not before:
                stretches.append([])
            stretches[-1].append(token)
        before = flag
    return [rows.tokenizer.encoder.decode(s) for s in stretches]


def whole(rows: RowEncoder, encoded: Encoded) -> str:
    return rows.tokenizer.encoder.decode(encoded.input_ids.tolist())
