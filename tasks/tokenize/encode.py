"""From parsed rows to token ids and loss masks, a batch at a time."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.tokenize.config import Data
from tasks.tokenize.errors import BadRow
from tasks.tokenize.mask import Masker, Span
from tasks.tokenize.report import How, Method
from tasks.tokenize.rows import TEMPLATE_ROLES, Conversation, Item, Message, PlainText, Tokens, unknown_role
from tasks.tokenize.template import MARKS, ChatTemplate, missing_turn
from tasks.tokenize.tokenizer import Piece, TextTokenizer


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids of one row, before any truncation."""

    id: str
    input_ids: npt.NDArray[np.int64]
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]"""
    how: How
    counts: Mapping[str, int] = field(default_factory=dict)
    """Turns by role, tool calls, and what is worth a note."""


@dataclass
class _Rendered:
    """A conversation on its way to tokens."""

    item: Conversation
    messages: list[Message]
    text: str
    spans: list[Span]
    how: Method
    mark: str | None
    pieces: list[Piece]
    counts: Counter[str]


class RowEncoder:
    """Renders, tokenizes and masks rows with one checkpoint's tokenizer."""

    def __init__(self, directory: Path, vocab_size: int, data: Data, trust_remote_code: bool = False) -> None:
        """``vocab_size``: rows of the model's embedding; a greater id cannot be looked up.

        Raises:
            TokenizerError: the tokenizer cannot be loaded or fails its self-test.
        """
        self.tokenizer = TextTokenizer(directory, trust_remote_code)
        self.template = ChatTemplate(self.tokenizer.hf, self.tokenizer.custom, data.template_kwargs, data.template_date)
        self._vocab_size = vocab_size
        self._parse_special = data.special_tokens == "parse"
        self._masker: Masker | None = None

    @property
    def masker(self) -> Masker:
        """Made at the first conversation: data without turns needs no chat template.

        Raises:
            TokenizerError: there is no chat template.
        """
        if self._masker is None:
            self.tokenizer.check_control(self.template.source(False), self.template.probe())
            self._masker = Masker(self.tokenizer, self.template, forgeable=self._parse_special)
        return self._masker

    def encode(self, items: Sequence[Item | BadRow]) -> list[Encoded | BadRow]:
        """Encode each item; an item that cannot be is replaced by what is wrong with it."""
        prepared = [self._prepare(item) for item in items]
        self.tokenizer.encode_all(key for p in prepared if isinstance(p, _Rendered) for key in self._keys(p))
        encoded = [self._finish(p) for p in prepared]
        self.tokenizer.trim_cache()
        return encoded

    def _prepare(self, item: Item | BadRow) -> "_Rendered | Encoded | BadRow":
        try:
            if isinstance(item, Conversation):
                return self._render(item)
            if isinstance(item, PlainText):
                return self._plain(item)
            if isinstance(item, Tokens):
                return Encoded(item.id, item.input_ids, item.loss_mask, "given" if item.masked else "text")
        except BadRow as e:
            return e
        return item

    def _plain(self, item: PlainText) -> Encoded:
        tokenizer, counts = self.tokenizer, {}
        text, mark = item.text, None
        if not self._parse_special and tokenizer.holds_control(text):
            mark = _unused_mark(text)
            text = tokenizer.escape(text, mark)
            counts = {"control_tokens_as_text": 1}
        pieces = tokenizer.split(tokenizer.with_bos(text), mark)
        ids = [t for p in pieces for t in self._ids(p)]
        return Encoded(item.id, np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=np.bool_), "text", counts)

    def _render(self, item: Conversation) -> _Rendered:
        counts = Counter({f"turns_{m['role']}": 0 for m in item.messages})
        for m in item.messages:
            counts[f"turns_{m['role']}"] += 1
            counts["tool_calls"] += len(m.get("tool_calls", ()))
            # Many templates write any role as it is, or as the system's.
            if m["role"] not in TEMPLATE_ROLES and not self.template.names(m["role"], item.tools is not None):
                raise BadRow("role", unknown_role(m["role"]))
        messages, tools, mark = self.template.prepared(item.messages), item.tools, None
        if not self._parse_special and any(map(self.tokenizer.holds_control, _strings([messages, tools]))):
            mark = _unused_mark([messages, tools])
            messages, tools = self._escaped(messages, mark), self._escaped(tools, mark)
            counts["control_tokens_as_text"] = 1
        masker = self.masker
        how: Method = "markers"
        text, spans = masker.marked(messages, tools)
        if not text:
            raise BadRow("template", "the chat template renders the conversation as nothing")
        if mark and f"\\u{ord(mark):04x}" in text.lower():
            raise BadRow("template", "the chat template writes the text's control tokens in an encoding of its own")
        missing = missing_turn(messages, text)
        if missing:
            raise BadRow("turn-left-out", f"the chat template leaves out {missing}")
        if not spans:
            spans, how = masker.spans(text, messages, tools)
        counts["reasoning_left_out"] = sum(
            1 for m in messages if m.get("reasoning_content") and m["reasoning_content"].strip() not in text
        )
        return _Rendered(item, messages, text, spans, how, mark, self.tokenizer.split(text, mark), counts)

    def _escaped(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self.tokenizer.escape(value, mark)
        if isinstance(value, Mapping):
            return {self._escaped(k, mark): self._escaped(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._escaped(v, mark) for v in value]
        return value

    def _keys(self, rendered: _Rendered) -> Iterator[tuple[str, bool]]:
        """Texts whose ids the conversation needs: its pieces, and pieces up to where a turn starts or ends."""
        for piece in rendered.pieces:
            if piece.token is None:
                yield piece.text, piece.start == 0
        for piece, at in _inside(rendered.pieces, rendered.spans):
            yield _up_to(rendered, piece, at), piece.start == 0

    def _ids(self, piece: Piece) -> list[int]:
        return self.tokenizer.encode(piece.text, piece.start == 0) if piece.token is None else [piece.token]

    def _finish(self, prepared: "_Rendered | Encoded | BadRow") -> Encoded | BadRow:
        try:
            if isinstance(prepared, _Rendered):
                prepared = self._assemble(prepared)
            if isinstance(prepared, Encoded):
                self._check_vocabulary(prepared.input_ids)
        except BadRow as e:
            return e
        return prepared

    def _check_vocabulary(self, ids: npt.NDArray[np.int64]) -> None:
        beyond = np.flatnonzero(ids >= self._vocab_size)
        if len(beyond):
            raise BadRow(
                "vocabulary",
                f"token {ids[beyond[0]]} at position {beyond[0]} is outside the model's vocabulary of "
                f"{self._vocab_size}; is the data tokenized for another model?",
            )

    def _assemble(self, rendered: _Rendered) -> Encoded:
        ids: list[int] = []
        starts: list[int] = []  # first token of each piece
        for piece in rendered.pieces:
            starts.append(len(ids))
            ids += self._ids(piece)
        starts.append(len(ids))
        bounds = self._boundaries(rendered, starts, exact=rendered.how == "prefixes")
        if bounds is None:
            rendered.spans = self.masker.by_family(rendered.text, rendered.messages)
            rendered.how = "family"
            bounds = self._boundaries(rendered, starts, exact=False)
            assert bounds is not None
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in rendered.spans:
            mask[bounds[start] : bounds[end]] = True
        self._check_mask(mask, rendered)
        rendered.counts["turns_without_end_token"] = sum(
            1
            for _, end in rendered.spans
            if bounds[end] == 0
            or self.tokenizer.encoder.decode(ids[bounds[end] - 1 : bounds[end]]) not in self.tokenizer.control
        )
        return Encoded(rendered.item.id, np.asarray(ids, dtype=np.int64), mask, rendered.how, +rendered.counts)

    def _boundaries(self, rendered: _Rendered, starts: list[int], exact: bool) -> dict[int, int] | None:
        """Index of the first token at or after each end of a span.

        A character inside a piece must be where a token ends; if ``exact``, None is the answer when it is not,
        else the token that reaches across it counts to what is before, and the report counts it.
        """
        bounds = {p.start: starts[i] for i, p in enumerate(rendered.pieces)}
        bounds[len(rendered.text)] = starts[-1]
        index = {p.start: i for i, p in enumerate(rendered.pieces)}
        for piece, at in _inside(rendered.pieces, rendered.spans):
            prefix = self.tokenizer.encode(_up_to(rendered, piece, at), piece.start == 0)
            whole = self._ids(piece)
            common = _common(prefix, whole)
            if common < len(prefix):
                if exact:
                    return None
                rendered.counts["ends_inside_a_token"] += 1
                length = len(_up_to(rendered, piece, at))
                common += 1
                while common < len(whole) and len(self.tokenizer.encoder.decode(whole[:common])) < length:
                    common += 1
            bounds[at] = starts[index[piece.start]] + common
        return bounds

    def _check_mask(self, mask: npt.NDArray[np.bool_], rendered: _Rendered) -> None:
        if not mask.any():
            raise BadRow("mask", f"method {rendered.how} supervises no token of a conversation with assistant turns")
        if mask.all() and any(m["role"] != "assistant" for m in rendered.messages):
            raise BadRow("mask", f"method {rendered.how} supervises every token, those of other roles included")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _unused_mark(value: Any) -> str:
    """A noncharacter that is nowhere in the text.

    Raises:
        BadRow: the text holds all of them.
    """
    texts = list(_strings(value))
    for mark in MARKS:
        if not any(mark in t for t in texts):
            return mark
    raise BadRow("characters", "the text holds control tokens and all of the noncharacters U+FDD0 to U+FDEF")


def _inside(pieces: Sequence[Piece], spans: Sequence[Span]) -> Iterator[tuple[Piece, int]]:
    """Ends of spans that lie inside a piece, with this piece; both in ascending order."""
    ends = iter(sorted({c for span in spans for c in span}))
    at = next(ends, None)
    for piece in pieces:
        while at is not None and at <= piece.start:
            at = next(ends, None)
        while at is not None and at < piece.end:
            yield piece, at
            at = next(ends, None)


def _up_to(rendered: _Rendered, piece: Piece, at: int) -> str:
    part = rendered.text[piece.start : at]
    return part.replace(rendered.mark, "") if rendered.mark else part


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
