"""Rendering by the model's own chat template, in the form of conversation that this template accepts."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any, Literal

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from tasks.tokenize.errors import BadRow, TokenizerError
from tasks.tokenize.rows import Message, text_of

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: no text should hold them

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
PROBE: list[Message] = [
    {"role": "user", "content": "Probe question one?"},
    {"role": "assistant", "content": "Probe answer one."},
    {"role": "user", "content": "Probe question two?"},
    {"role": "assistant", "content": "Probe answer two."},
]
TOOL_PROBE: list[Message] = [
    {"role": "user", "content": "Probe question?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "functions.probe_tool:0",
                "type": "function",
                "function": {"name": "probe_tool", "arguments": {"word": "probe-argument"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "functions.probe_tool:0", "name": "probe_tool", "content": "probe-result"},
    {"role": "assistant", "content": "Probe answer."},
]


@dataclass(frozen=True)
class Form:
    """What a template wants where chat formats differ."""

    arguments: Literal["object", "string"] = "object"
    """Of a tool call."""
    no_content: Literal["", "null"] = ""
    """Content of a turn that only calls tools."""
    parts: bool = False
    """Whether a list of text parts is understood."""


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, custom: bool, variables: Mapping[str, Any], date: str) -> None:
        """``custom``: the tokenizer is the checkpoint's own Python, whose ``apply_chat_template`` may do more."""
        self._tokenizer = tokenizer
        self._custom = custom
        today = datetime.fromisoformat(date)
        self._variables = {**tokenizer.special_tokens_map, "strftime_now": today.strftime, **variables}
        self._sources: dict[bool, str] = {}
        self.form = self._find_form()

    def source(self, tools: bool) -> str:
        """Text of the template.

        Raises:
            TokenizerError: the tokenizer has none.
        """
        try:
            if tools not in self._sources:
                self._sources[tools] = str(self._tokenizer.get_chat_template(None, [PROBE_TOOL] if tools else None))
            return self._sources[tools]
        except ValueError as e:
            raise TokenizerError(
                "the checkpoint has no chat template, which data of messages needs: add chat_template.jinja to it, "
                f"or give text or input_ids ({e})"
            ) from None

    def names(self, role: str, tools: bool) -> bool:
        """Whether the template has a rule for this role."""
        return any(f"{quote}{role}{quote}" in self.source(tools) for quote in "'\"")

    def has_markers(self, tools: bool) -> bool:
        return GENERATION.search(self.source(tools)) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text.

        Raises:
            BadRow: the template refuses it.
        """
        if self._custom and messages:
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        list(messages),
                        tools=None if tools is None else list(tools),
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        **self._variables,
                    )
                )
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as e:
                raise BadRow("template", f"the chat template refuses the conversation: {e}") from None
        return self._render(messages, tools, add_generation_prompt, False)[0]

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text and the [start, end) of each part inside generation markers.

        Raises:
            BadRow: the template refuses it.
        """
        return self._render(messages, tools, False, True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        marked: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=None if tools is None else list(tools),
                chat_template=self.source(tools is not None),
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as e:
            raise BadRow("template", f"the chat template refuses the conversation: {e}") from None
        return str(texts[0]), [(int(a), int(b)) for a, b in spans[0]] if marked else []

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template takes."""
        return [self._prepared(m) for m in messages]

    def _prepared(self, message: Message) -> Message:
        changed = dict(message)
        if not self.form.parts and not isinstance(message["content"], str):
            changed["content"] = text_of(message)
        calls = message.get("tool_calls")
        if calls:
            if self.form.no_content == "null" and message["content"] == "":
                changed["content"] = None
            if self.form.arguments == "string":
                changed["tool_calls"] = [
                    {**c, "function": {**c["function"], "arguments": _json(c["function"]["arguments"])}} for c in calls
                ]
        return changed

    def probe(self) -> str:
        """What the template makes of conversations with and without tools, as far as it takes them."""
        text = ""
        for messages, tools in ((PROBE, None), (TOOL_PROBE, [PROBE_TOOL])):
            with suppress(BadRow):
                text += self.render(self.prepared(messages), tools)
        return text

    def _find_form(self) -> Form:
        """Try which form the template takes, on conversations of which every part must come out."""
        try:
            self.source(False)
        except TokenizerError:
            return Form()
        self.form = Form(parts=True)
        parts = self._renders(
            [
                {"role": "user", "content": [{"type": "text", "text": "Probe-a"}, {"type": "text", "text": "Probe-b"}]},
                {"role": "assistant", "content": "Probe answer."},
            ],
            ["Probe-a", "Probe-b"],
            absent="'text'",
        )
        options: product[tuple[Any, Any]] = product(("object", "string"), ("", "null"))
        for arguments, no_content in options:
            self.form = Form(arguments, no_content, parts)
            if self._renders(TOOL_PROBE, ["probe_tool", "probe-argument", "probe-result"], tools=[PROBE_TOOL]):
                return self.form
        return Form(parts=parts)

    def _renders(
        self,
        messages: list[Message],
        needed: list[str],
        absent: str | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> bool:
        try:
            text = self.render(self.prepared(messages), tools)
            calls = text if tools is None else text.replace(self.render(self.prepared(messages[:1]), tools), "")
        except BadRow:
            return False
        return all(n in calls for n in needed) and (absent is None or absent not in text)


def missing_turn(messages: Sequence[Message], text: str) -> str | None:
    """Says which turn a rendered text leaves out, if any: a template may drop a role or a call without a word.

    What a template is known to do to a text is allowed for: trimming, JSON quoting (Llama's tool results), and
    leaving out an assistant's reasoning up to ``</think>``.
    """
    for i, message in enumerate(messages):
        parts: list[tuple[str, str]] = []
        content = message["content"]
        for part in [content] if isinstance(content, str) else [p["text"] for p in content or ()]:
            if message["role"] == "assistant":
                part = part.rpartition("</think>")[2]
            parts.append(("text", part.strip()))
        for call in message.get("tool_calls", ()):
            parts.append((f"call of {call['function']['name']}", call["function"]["name"]))
        for what, part in parts:
            if part not in text and not any(json.dumps(part, ensure_ascii=a)[1:-1] in text for a in (False, True)):
                return f"turn {i} ({message['role']}): the {what}"
    return None


def _json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
