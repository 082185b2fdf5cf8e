"""The checkpoint's own tokenizer, as a map from pieces of text to ids.

A tokenizer splits a text at its added tokens (control tokens such as ``<|im_end|>``, tags such as ``<think>``) and
encodes what lies between them on its own. This module does the first step itself, so that a control token which a
user typed stays ordinary text, and so that the character at which a turn begins can be found among the ids without
offsets, which tokenizers in pure Python do not have.
"""

import inspect
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.tokenize.errors import TokenizerError

CACHE_BYTES = 64 * 2**20
CACHE_ENTRY_CHARS = 2**17

CONTROL_IN_TEXT = re.compile(r"<\|[^\s|<>]{1,60}\|>|<｜[^\s｜<>]{1,60}｜>")
CONTROL = re.compile(r"<[|｜].*[|｜]>|\[(BOS|EOS|PAD|UNK|INST|/INST)\]", re.DOTALL)

#: Texts on which splitting at added tokens must give the same ids as the tokenizer itself.
SELF_TEST = (
    "Hello,  world! It's 12345.67\n\n  x = [1, 2]\t# ok",
    "Grüße 你好，世界 \U0001f469‍\U0001f469‍\U0001f467 مرحبا é",
    " leading and trailing ",
)


class Encoder(Protocol):
    """Encodes ordinary text: an added token in it is not recognised."""

    def encode(self, texts: Sequence[str], first: Sequence[bool]) -> list[list[int]]:
        """Ids of each text; ``first`` says whether the text is at the start of its sample."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FastEncoder:
    """A Rust tokenizer without its added tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._whole = tokenizer
        self._first = _without_added_tokens(tokenizer, tokenizer.pre_tokenizer)
        self._later = self._first
        scheme = tokenizer.pre_tokenizer
        if isinstance(scheme, pre_tokenizers.Metaspace) and scheme.prepend_scheme == "first":
            later = pre_tokenizers.Metaspace(replacement=scheme.replacement, prepend_scheme="never", split=scheme.split)
            self._later = _without_added_tokens(tokenizer, later)

    def encode(self, texts: Sequence[str], first: Sequence[bool]) -> list[list[int]]:
        if self._first is self._later:
            return [e.ids for e in self._first.encode_batch_fast(list(texts), add_special_tokens=False)]
        pick = (self._first if f else self._later for f in first)
        return [t.encode(text, add_special_tokens=False).ids for t, text in zip(pick, texts, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._whole.decode(list(ids), skip_special_tokens=False))


def _without_added_tokens(tokenizer: Tokenizer, pre_tokenizer: Any) -> Tokenizer:
    plain = Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    plain.pre_tokenizer = pre_tokenizer
    return plain


class SlowEncoder:
    """A tokenizer in Python, such as the tiktoken-based one that Kimi ships."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters:
            self._kwargs: dict[str, bool] = {"allow_special_tokens": False}
        else:
            self._kwargs = {"add_special_tokens": False, "split_special_tokens": True}

    def encode(self, texts: Sequence[str], first: Sequence[bool]) -> list[list[int]]:
        return [list(self._tokenizer.encode(text, **self._kwargs)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


@dataclass(frozen=True)
class Piece:
    """An added token, or the text between two of them."""

    start: int
    """Index of its first character in the rendered text."""
    end: int
    text: str
    """Without escapes."""
    token: int | None
    """Id of the added token; None for text."""


class TextTokenizer:
    """Splits a text at added tokens and encodes the rest, with a cache for pieces that come again (headers, tools)."""

    def __init__(self, directory: Path, trust_remote_code: bool = False) -> None:
        self.hf, self.custom = load(directory, trust_remote_code)
        added = {str(t): int(i) for i, t in self.hf.added_tokens_decoder.items()}
        self.added: dict[str, int] = added
        special = {str(t) for t in self.hf.added_tokens_decoder.values() if t.special}
        self.control: frozenset[str] = frozenset(t for t in added if t in special or CONTROL.fullmatch(t))
        """Added tokens that structure a conversation and that no text should be able to forge."""
        self.control_strings = tuple(self.control)
        self.bos: str | None = self.hf.bos_token
        end_ids = set(_end_ids(directory, self.hf))
        self.end_tokens = tuple(t for t, i in added.items() if i in end_ids)
        """Tokens at which the model's generation ends."""
        self.encoder: Encoder = SlowEncoder(self.hf) if self.custom else FastEncoder(self.hf.backend_tokenizer)
        self._pattern = _pattern(self.hf.added_tokens_decoder.values())
        self._control_pattern = re.compile(
            "|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or r"(?!)"
        )
        tags = sorted(set(added) - self.control, key=len, reverse=True)
        self._tag_pattern = re.compile("|".join(map(re.escape, tags)) or r"(?!)")
        self._cache: dict[tuple[str, bool], list[int]] = {}
        self._long: list[tuple[str, bool]] = []
        self._cached_bytes = 0
        self._adds_bos = _adds_bos(directory, self.hf)
        declared = _json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
        self._declared = {str(t["content"]): int(i) for i, t in declared.items()}
        self._self_test()

    def holds_control(self, text: str) -> bool:
        """Whether the text holds the string of a control token."""
        return self._control_pattern.search(text) is not None

    def tags(self, text: str) -> list[str]:
        """Added tokens in the text that are no control tokens, such as ``<think>``."""
        return self._tag_pattern.findall(text)

    def escape(self, text: str, mark: str) -> str:
        """Put ``mark`` into each control token of the text, so that it is none any more."""
        return self._control_pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)

    def split(self, text: str, mark: str | None = None) -> list[Piece]:
        """Pieces of a text; ``mark`` is taken out of them."""
        pieces: list[Piece] = []
        position = 0

        def ordinary(end: int) -> None:
            if end > position:
                part = text[position:end]
                pieces.append(Piece(position, end, part.replace(mark, "") if mark else part, None))

        for match in self._pattern.finditer(text):
            ordinary(match.start())
            content = match[0] if match.lastgroup is None else match[0].strip()
            pieces.append(Piece(match.start(), match.end(), match[0], self.added[content]))
            position = match.end()
        ordinary(len(text))
        return pieces

    def encode_all(self, texts: Iterable[tuple[str, bool]]) -> None:
        """Encode texts (each with whether it starts its sample) in one batch, for :meth:`encode` to find them."""
        missing = [t for t in dict.fromkeys(texts) if t not in self._cache]
        if not missing:
            return
        encoded = self.encoder.encode([t for t, _ in missing], [f for _, f in missing])
        for key, ids in zip(missing, encoded, strict=True):
            self._cache[key] = ids
            self._cached_bytes += _cost(key[0], ids)
            if len(key[0]) > CACHE_ENTRY_CHARS:
                self._long.append(key)

    def trim_cache(self) -> None:
        """Forget long texts, and the oldest ones beyond the cache's size."""
        for key in self._long:
            self._cached_bytes -= _cost(key[0], self._cache.pop(key))
        self._long.clear()
        while self._cached_bytes > CACHE_BYTES:
            oldest = next(iter(self._cache))
            self._cached_bytes -= _cost(oldest[0], self._cache.pop(oldest))

    @property
    def cached(self) -> list[str]:
        """Texts in the cache."""
        return [text for text, _ in self._cache]

    def forget(self) -> None:
        """Empty the cache."""
        self._cache.clear()
        self._long.clear()
        self._cached_bytes = 0

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of ordinary text."""
        key = (text, first)
        if key not in self._cache:
            self.encode_all([key])
        return self._cache[key]

    def with_bos(self, text: str) -> str:
        """A plain text as the model expects it: with a begin-of-sequence token, where it uses one, and only one."""
        if self._adds_bos and self.bos and not text.startswith(self.bos):
            return self.bos + text
        return text

    def ids(self, text: str) -> list[int]:
        """Ids of a text whose added tokens count as such."""
        ids: list[int] = []
        for piece in self.split(text):
            ids += self.encode(piece.text, piece.start == 0) if piece.token is None else [piece.token]
        return ids

    def _self_test(self) -> None:
        tokens = sorted(self.control)[:: max(1, len(self.control) // 8)]
        texts = [*SELF_TEST, *(f"{SELF_TEST[0]}{t}{SELF_TEST[1]}{t}{t}{SELF_TEST[2]}" for t in tokens)]
        for text in texts:
            expected = self._reference(text)
            if self.ids(text) != expected:
                raise TokenizerError(
                    f"this tokenizer encodes the text around added tokens in a way that is not supported: {text!r} "
                    f"gives {expected}, its pieces give {self.ids(text)}"
                )

    def check_control(self, template: str, rendered: str) -> None:
        """Assert that the control tokens of the chat template are tokens of this tokenizer, one id each, both ways.

        ``rendered``: what the template makes of some conversation.

        Raises:
            TokenizerError: one is not, or the tokenizer's files contradict each other.
        """
        for found in CONTROL_IN_TEXT.finditer(rendered):
            if found[0] not in self.added:
                raise TokenizerError(
                    f"the chat template writes {found[0]!r}, which is no token of the tokenizer; they do not belong "
                    "together"
                )
        named = {t: i for t, i in self.added.items() if t in template or t in self.end_tokens}
        for content, token in named.items():
            declared = self._declared.get(content, token)
            decoded, encoded = self.encoder.decode([token]), self._reference(content)
            if declared != token or decoded != content or encoded != [token]:
                raise TokenizerError(
                    f"{content!r} is token {declared} by tokenizer_config.json and {token} in the tokenizer, where "
                    f"{token} decodes to {decoded!r} and {content!r} encodes to {encoded}"
                )

    def _reference(self, text: str) -> list[int]:
        """Ids by the tokenizer's own handling of added tokens."""
        if not self.custom:
            return list(self.hf.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        if "allow_special_tokens" in inspect.signature(self.hf.encode).parameters:
            return list(self.hf.encode(text))
        return list(self.hf.encode(text, add_special_tokens=False))


def _cost(text: str, ids: list[int]) -> int:
    """About how many bytes an entry of the cache takes."""
    return 300 + 2 * len(text) + 16 * len(ids)


def load(directory: Path, trust_remote_code: bool) -> tuple[Any, bool]:
    """The tokenizer in a checkpoint's directory, and whether it is in Python that the checkpoint ships.

    A ``tokenizer.json`` is used as it stands: classes made for one family of models replace its parts by their own
    (LlamaTokenizer drops DeepSeek's pre-tokenizer, and with it every blank).

    Raises:
        TokenizerError: there is none, or it is code that may not run.
    """
    fast = (directory / "tokenizer.json").is_file()
    config = _json(directory / "tokenizer_config.json")
    if not fast and not config:
        raise TokenizerError(f"no tokenizer.json or tokenizer_config.json in {directory}")
    code = (config.get("auto_map") or {}).get("AutoTokenizer")
    if not fast and code and not trust_remote_code:
        raise TokenizerError(
            f"the tokenizer in {directory} is Python code that the checkpoint ships ({code}); "
            "set `model.trust_remote_code: true` if you trust it"
        )
    try:
        if fast:
            return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True), False
        from transformers import AutoTokenizer  # imports torch, which takes seconds in each process

        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as e:
        raise TokenizerError(f"the tokenizer in {directory} cannot be loaded: {type(e).__name__}: {e}") from e
    return tokenizer, not hasattr(tokenizer, "backend_tokenizer")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _end_ids(directory: Path, tokenizer: Any) -> Iterable[int]:
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id
    for name in ("generation_config.json", "config.json"):
        config = _json(directory / name)
        for part in (config, config.get("text_config") or {}):  # of a model with vision
            ids = part.get("eos_token_id")
            yield from ids if isinstance(ids, list) else [] if ids is None else [ids]


def _adds_bos(directory: Path, tokenizer: Any) -> bool:
    """Whether the tokenizer puts a begin-of-sequence token before a plain text."""
    if tokenizer.bos_token_id is None:
        return False
    configured = _json(directory / "tokenizer_config.json").get("add_bos_token")
    if configured is not None:
        return bool(configured)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and backend.encode("a").ids[:1] == [tokenizer.bos_token_id]


def _pattern(tokens: Iterable[Any]) -> re.Pattern[str]:
    """Matches an added token, the longest where several fit; a named group holds those that take in blanks."""
    plain, blank = [], []
    for token in sorted(tokens, key=lambda t: len(str(t)), reverse=True):
        expression = re.escape(str(token))
        if token.single_word:
            expression = rf"(?<!\w){expression}(?!\w)"
        if token.lstrip or token.rstrip:
            blank.append((r"\s*" if token.lstrip else "") + expression + (r"\s*" if token.rstrip else ""))
        else:
            plain.append(expression)
    alternatives = ["|".join(plain)] if plain else []
    if blank:
        alternatives.append(f"(?P<blank>{'|'.join(blank)})")
    return re.compile("|".join(alternatives) or r"(?!)")
