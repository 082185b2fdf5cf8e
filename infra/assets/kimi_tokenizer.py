"""A tokenizer in Python on tiktoken with the interface of the one that Kimi's checkpoints ship.

It is copied into a checkpoint's directory and loaded from there with ``trust_remote_code``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class KimiTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Ranks from ``tiktoken.model``, control tokens from ``added_tokens_decoder``."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, added_tokens_decoder: dict[int, Any] | None = None, **kwargs: Any) -> None:
        ranks = load_tiktoken_bpe(vocab_file)
        special = {str(getattr(t, "content", t)): int(i) for i, t in (added_tokens_decoder or {}).items()}
        self.model = tiktoken.Encoding(
            Path(vocab_file).name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self._tokens = {i: self.model.decode_single_token_bytes(i) for i in range(self.model.n_vocab)}
        self._ids = {self._name(t): i for i, t in self._tokens.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @staticmethod
    def _name(token: bytes) -> str:
        return token.decode("latin-1")

    def encode(self, text: str, allow_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    def decode(self, token_ids: int | Sequence[int], **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.model.decode(ids)

    @property
    def vocab_size(self) -> int:
        return self.model.n_vocab

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._name(self._tokens[i]) for i in self.model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._name(self._tokens[index])
