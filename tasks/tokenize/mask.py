"""Which tokens of a conversation a trainer supervises: what the assistant itself writes, and its end of turn.

Three methods, in this order:

1. ``markers``: the template says so itself, by ``{% generation %}``.
2. ``prefixes``: a turn starts where the conversation before it, rendered with a generation prompt, ends; and it ends
   where the conversation up to it ends. Each must be a prefix of the whole, or the method does not apply (some
   templates take reasoning out of earlier turns).
3. ``family``: the control tokens that open and close an assistant's turn in a known family of templates.

All three give stretches [start, end) of the rendered text, which :func:`tidied` then trims alike.

Rendering every prefix takes time quadratic in the number of turns. It is done once for each shape of conversation
(see :meth:`Masker._shape`): where the family's rule finds the same stretches, it stands in for the prefixes of later
conversations of that shape.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tasks.tokenize.errors import BadRow
from tasks.tokenize.report import Method
from tasks.tokenize.rows import Message
from tasks.tokenize.template import PROBE, ChatTemplate
from tasks.tokenize.tokenizer import TextTokenizer

Span = tuple[int, int]
Shape = tuple[bool, tuple[tuple[Any, ...], ...]]

MAX_SHAPES = 10_000

EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")
OPEN_REASONING = re.compile(r"<think>\s*\Z")
NO_REASONING = re.compile(r"\s*</think>\s*")


@dataclass(frozen=True)
class Family:
    """How a family of chat templates delimits the assistant's turns."""

    name: str
    tokens: tuple[str, ...]
    """Control tokens that a tokenizer of the family has."""
    opening: str
    """Regular expression of what comes before the assistant's own text."""
    closing: str
    """Regular expression of the end of a turn, which is supervised."""


FAMILIES = (
    Family(
        "kimi",
        ("<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        r"<\|im_assistant\|>[^<]*<\|im_middle\|>",
        r"<\|im_end\|>",
    ),
    Family(
        "deepseek",
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        r"<｜Assistant｜>|<｜tool▁outputs▁end｜>(?!<｜(?:User|Assistant)｜>|\Z)"
        r"|<｜tool▁output▁end｜>(?!\s*<｜(?:tool▁output▁begin|tool▁outputs▁end|User|Assistant)｜>|\Z)",
        r"<｜end▁of▁sentence｜>",
    ),
    Family(
        "llama3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        r"<\|eot_id\|>|<\|eom_id\|>",
    ),
    Family("qwen3", ("<|im_start|>", "<|im_end|>"), r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
)


@dataclass(frozen=True)
class Rule:
    """A family's delimiters, proven on a probe conversation with this checkpoint's template."""

    family: Family
    pattern: re.Pattern[str]
    prompt_tail: str
    """What the template's generation prompt adds to the opening, e.g. ``<think>``."""

    def spans(self, text: str) -> list[Span]:
        found = []
        for match in self.pattern.finditer(text):
            start, end = match.span("turn")
            if self.prompt_tail and text.startswith(self.prompt_tail, start):
                start += len(self.prompt_tail)
            found.append((start, end))
        return found


def find_rule(tokenizer: TextTokenizer, template: ChatTemplate) -> tuple[Rule | None, str]:
    """The family's rule for this checkpoint, or None and why there is none."""
    family = next((f for f in FAMILIES if set(f.tokens) <= set(tokenizer.added)), None)
    if family is None:
        return None, f"the tokenizer belongs to no known family ({', '.join(f.name for f in FAMILIES)})"
    pattern = re.compile(f"(?:{family.opening})(?P<turn>.*?(?:{family.closing}))", re.DOTALL)
    try:
        text = template.render(PROBE, None)
        before = template.render(PROBE[:1], None)
        prompted = template.render(PROBE[:1], None, add_generation_prompt=True)
    except BadRow as e:
        return None, f"the template refuses the probe conversation: {e.detail}"
    added = prompted.removeprefix(before)
    openings = list(re.finditer(family.opening, added))
    tail = added[openings[-1].end() :] if openings else ""
    rule = Rule(family, pattern, tail)
    spans = [tidied(text, s, tokenizer, True) for s in rule.spans(text)]
    answers = [m["content"] for m in PROBE if m["role"] == "assistant"]
    found = [text[a:b] for a, b in spans]
    if len(found) != len(answers) or not all(
        re.fullmatch(re.escape(a) + f"(?:{family.closing})", f) for a, f in zip(answers, found, strict=True)
    ):
        return None, f"the rule of family {family.name} finds {found} for the turns {answers} of the probe conversation"
    return rule, ""


class Masker:
    """Finds the supervised stretches of conversations rendered by one template."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, forgeable: bool = False) -> None:
        """``forgeable``: the data's text may hold control tokens, so that those of a family prove nothing."""
        self._tokenizer = tokenizer
        self._template = template
        self._forgeable = forgeable
        self.rule, self._no_rule = find_rule(tokenizer, template)
        self._methods: dict[Shape, Method] = {}

    def spans(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[Span], Method]:
        """Stretches by the first method without markers that applies.

        Raises:
            BadRow: none does.
        """
        shape = None if self.rule is None or self._forgeable else self._shape(messages, tools is not None)
        method = None if shape is None else self._methods.get(shape)
        if method is not None:
            with suppress(BadRow):
                return self.by_family(text, messages), method
        found = self.by_prefixes(text, messages, tools)
        if found is None:
            by_rule, method = self.by_family(text, messages), "family"
            found = by_rule
        else:
            method = "prefixes"
            try:
                by_rule = [] if shape is None else self.by_family(text, messages)
            except BadRow:
                by_rule = []
        if shape is not None and by_rule == found:
            if len(self._methods) >= MAX_SHAPES:
                self._methods.clear()
            self._methods[shape] = method
        return found, method

    def _shape(self, messages: Sequence[Message], tools: bool) -> Shape:
        """All that a template is expected to decide by: whose turn, what it has, and tags in its text.

        Of a group of turns that starts with the user's and comes again and again, three count.
        """
        groups: list[tuple[Any, ...]] = []
        for message in messages:
            content = message["content"] or ""
            parts = [content] if isinstance(content, str) else [p["text"] for p in content]
            tags = {tag for part in parts if "<" in part for tag in self._tokenizer.tags(part)}
            calls = len(message.get("tool_calls", ()))
            fields = tuple(k for k, v in message.items() if v)
            turn = (message["role"], fields, len(parts), min(calls, 3), frozenset(tags))
            if message["role"] == "user" or not groups:
                groups.append(())
            groups[-1] += (turn,)
        kept = [g for i, g in enumerate(groups) if i < 3 or groups[i - 3 : i] != [g] * 3]
        return tools, tuple(kept)

    def marked(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[Span]]:
        """The rendered text, and the supervised stretches if the template marks them."""
        if not self._template.has_markers(tools is not None):
            return self._template.render(messages, tools), []
        text, spans = self._template.render_marked(messages, tools)
        return text, [tidied(text, s, self._tokenizer, False) for s in spans]

    def by_prefixes(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[Span] | None:
        """Stretches by rendering each prefix of the conversation, None if one is no prefix of the whole."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                through = text if i + 1 == len(messages) else self._template.render(messages[: i + 1], tools)
                before = self._template.render(messages[:i], tools, add_generation_prompt=True)
            except BadRow:
                return None
            if not text.startswith(through) or not through.startswith(before):
                return None
            spans.append(tidied(text, (len(before), len(through)), self._tokenizer, True))
        return spans

    def by_family(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """Stretches by the family's control tokens.

        Raises:
            BadRow: there is no rule, or what it finds are not the conversation's turns.
        """
        if self.rule is None:
            raise BadRow("mask", f"no method finds the assistant's turns in the rendered text: {self._no_rule}")
        spans = [tidied(text, s, self._tokenizer, True) for s in self.rule.spans(text)]
        turns = [(i, m) for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans) != len(turns):
            raise BadRow(
                "mask",
                f"the template renders {len(turns)} assistant turns, but {len(spans)} with the delimiters of family "
                f"{self.rule.family.name}",
            )
        for (start, end), (i, turn) in zip(spans, turns, strict=True):
            content = turn["content"] if isinstance(turn["content"], str) else ""
            own = content.rpartition("</think>")[2].strip()
            if own not in text[start:end]:
                raise BadRow("mask", f"turn {i} is not where family {self.rule.family.name} has its text")
        return spans


def tidied(text: str, span: Span, tokenizer: TextTokenizer, ends_with_turn: bool) -> Span:
    """A stretch without the empty think block that a template puts first, and up to the end of its turn.

    ``ends_with_turn``: the stretch reaches beyond the end-of-turn token, so that blanks after it are cut; else the
    token is taken in if it comes next.
    """
    start, end = span
    opened = OPEN_REASONING.search(text, max(0, start - 16), start)  # by the generation prompt
    empty = (NO_REASONING if opened else EMPTY_REASONING).match(text, start, end)
    if empty:
        start = empty.end()
    if not ends_with_turn:
        for token in tokenizer.end_tokens:
            if text.startswith(token, end):
                return start, end + len(token)
    turn = text[start:end].rstrip()
    return (start, start + len(turn)) if turn.endswith(tokenizer.control_strings) else (start, end)
