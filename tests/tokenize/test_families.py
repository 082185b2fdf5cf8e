"""Masks by the real templates and tokenizers of four families, on real conversations.

What must be supervised is written down here once more, family by family, apart from the code under test.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infra.assets.chats import chats
from infra.assets.tokenizers import tokenizer
from tasks.tokenize.config import Columns
from tasks.tokenize.encode import Encoded, RowEncoder
from tasks.tokenize.errors import BadRow
from tasks.tokenize.rows import Message, parse
from tests.tokenize.conftest import chat, encode, encoder, supervised, whole

Row = dict[str, Any]


@cache
def rows_of(name: str) -> RowEncoder:
    return encoder(tokenizer(name), trust_remote_code=True)


@pytest.fixture(scope="module")
def conversations() -> list[Row]:
    """880: sessions with tools, single turns with tools, and talk of several turns."""
    chosen: list[Row] = []
    wanted = {
        "multi_turn_base": 200,
        "multi_turn_long": 60,
        "live_multiple": 200,
        "live_parallel": 40,
        "live_simple": 60,
    }
    with chats("bfcl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            kind = next((k for k in wanted if f"/{k}" in row["id"]), None)
            if kind and wanted[kind] > 0:
                wanted[kind] -= 1
                chosen.append(row)
    talk = 0
    with chats("chitchat").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if 4 <= len(row["messages"]) <= 16 and talk < 320:
                talk += 1
                chosen.append(row)
    return chosen


def arguments(call: dict[str, Any]) -> str:
    return json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)


def qwen3(turn: Message, last: bool) -> str:
    text = turn["content"].lstrip("\n") if last else turn["content"]
    for call in turn.get("tool_calls", ()):
        text += "\n" if text else ""
        text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments(call)}}}\n</tool_call>'
    return text + "<|im_end|>"


def llama(turn: Message, last: bool) -> str:
    if "tool_calls" in turn:
        (call,) = turn["tool_calls"]
        return f'{{"name": "{call["function"]["name"]}", "parameters": {arguments(call)}}}<|eot_id|>'
    return turn["content"].strip() + "<|eot_id|>"


def kimi(turn: Message, last: bool) -> str:
    if "tool_calls" not in turn:
        return turn["content"] + "<|im_end|>"
    calls = "".join(
        f"<|tool_call_begin|>functions.{c['function']['name']}:{i}<|tool_call_argument_begin|>{arguments(c)}"
        "<|tool_call_end|>"
        for i, c in enumerate(turn["tool_calls"])
    )
    return f"{turn['content']}<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|><|im_end|>"


def deepseek(turn: Message, last: bool) -> str:
    """The template ends a turn with tool calls only from the second call on, and then after each."""
    if "tool_calls" not in turn:
        return turn["content"] + "<｜end▁of▁sentence｜>"
    text = ""
    for i, call in enumerate(turn["tool_calls"]):
        text += "\n" if i else "<｜tool▁calls▁begin｜>"
        text += (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n{arguments(call)}\n```"
        )
        text += "<｜tool▁call▁end｜>" + ("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" if i else "")
    return text


# Exceptions: reason -> (start of the message, what a conversation that is refused for it has)
Exceptions = dict[str, tuple[str, Callable[[Row], bool]]]


def calling_turns(row: Row) -> int:
    return sum(1 for m in row["messages"] if m.get("tool_calls"))


DEEPSEEK: Exceptions = {
    # From the second turn with calls on, DeepSeek-V3's template writes no assistant header before them.
    "mask": ("the template renders", lambda row: calling_turns(row) > 1),
}
LLAMA: Exceptions = {
    "template": (
        "the chat template refuses the conversation: This model only supports single tool-calls at once!",
        lambda row: any(len(m.get("tool_calls", ())) > 1 for m in row["messages"]),
    )
}


@pytest.mark.parametrize(
    ("name", "expected", "exceptions", "least"),
    [
        ("deepseek-v3", deepseek, DEEPSEEK, 600),
        ("qwen3", qwen3, {}, 880),
        ("llama-3.1", llama, LLAMA, 600),
        ("kimi-k2", kimi, {}, 880),
    ],
)
def test_what_is_supervised_is_what_the_assistant_says(
    name: str,
    expected: Callable[[Message, bool], str],
    exceptions: Exceptions,
    least: int,
    conversations: list[Row],
) -> None:
    rows = rows_of(name)
    outcomes: list[Encoded | BadRow] = []
    for start in range(0, len(conversations), 64):
        outcomes += rows.encode([parse(r, Columns(), "x") for r in conversations[start : start + 64]])
    kept: Counter[str] = Counter()
    for row, outcome in zip(conversations, outcomes, strict=True):
        if isinstance(outcome, BadRow):
            message, applies = exceptions[outcome.reason]
            assert outcome.detail.startswith(message)
            assert applies(row), row["id"]
            continue
        kept[outcome.how] += 1
        turns = [
            expected(m, i + 1 == len(row["messages"]))
            for i, m in enumerate(row["messages"])
            if m["role"] == "assistant"
        ]
        assert supervised(rows, outcome) == turns, row["id"]
    assert kept.total() >= least, kept


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3", "llama-3.1", "kimi-k2"])
def test_ids_are_the_tokenizers_own(name: str, conversations: list[Row]) -> None:
    rows = rows_of(name)
    for row in conversations[::25]:
        item = parse(row, Columns(), "x")
        (encoded,) = rows.encode([item])
        if isinstance(encoded, BadRow):
            continue
        text = rows.template.render(rows.template.prepared(item.messages), item.tools)  # type: ignore[union-attr]
        own = rows.tokenizer.hf
        ids = (
            own.encode(text)
            if rows.tokenizer.custom
            else own.backend_tokenizer.encode(text, add_special_tokens=False).ids
        )
        assert encoded.input_ids.tolist() == ids
        bos = own.bos_token_id
        assert ids.count(bos) == (1 if name in ("deepseek-v3", "llama-3.1") else 0)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3", "llama-3.1", "kimi-k2", "kimi-k2-thinking"])
def test_the_rule_of_each_family_passes_its_self_test(name: str) -> None:
    rule = rows_of(name).masker.rule
    assert rule is not None
    assert rule.family.name == name.split("-")[0].replace("llama", "llama3")
    row = chat("Question?", "Answer.", "Another?", "Yes.", "Thanks")
    text = rows_of(name).template.render(row["messages"], None)
    spans = rows_of(name).masker.by_family(text, row["messages"])
    assert [text[a:b].partition("<")[0] for a, b in spans] == ["Answer.", "Yes."]


def test_kimi_k2_thinking_takes_reasoning_out_of_finished_turns() -> None:
    rows = rows_of("kimi-k2-thinking")
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First.", "reasoning_content": "Thought one."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second.", "reasoning_content": "Thought two."},
    ]
    encoded = encode(rows, {"messages": turns})
    # This copy of the template takes reasoning out of the turns up to the first one without calls.
    assert supervised(rows, encoded) == ["First.<|im_end|>", "<think>Thought two.</think>Second.<|im_end|>"]
    assert encoded.counts["reasoning_left_out"] == 1
    assert "assistant<|im_middle|><think></think>First." in whole(rows, encoded)


def test_qwen3_reasoning_of_the_last_turn_is_supervised_and_of_earlier_ones_left_out() -> None:
    rows = rows_of("qwen3")
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nThought one.\n</think>\n\nFirst."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second.", "reasoning_content": "Thought two."},
    ]
    encoded = encode(rows, {"messages": turns})
    assert supervised(rows, encoded) == ["First.<|im_end|>", "<think>\nThought two.\n</think>\n\nSecond.<|im_end|>"]
    assert encoded.how == "family"


def test_qwen3_an_empty_think_block_is_not_supervised() -> None:
    rows = rows_of("qwen3")
    encoded = encode(rows, chat("One?", "First."))
    assert whole(rows, encoded).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nFirst.<|im_end|>\n")
    assert supervised(rows, encoded) == ["First.<|im_end|>"]
    assert encoded.how == "prefixes"


def test_qwen3_a_turn_that_starts_with_a_newline_shares_a_token_with_its_header() -> None:
    rows = rows_of("qwen3")
    encoded = encode(rows, chat("One?", "\nFirst.", "Two?", "Second."))
    assert supervised(rows, encoded) == ["First.<|im_end|>", "Second.<|im_end|>"]
    assert encoded.counts["ends_inside_a_token"] == 1


KIMI_K25 = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{%- set ns.n = -1 -%}
{%- for m in messages -%}
  {{- '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + m.role + '<|im_middle|>' -}}
  {%- if m.role == 'assistant' -%}
    {%- if not m.tool_calls -%}{%- set ns.n = ns.n + 1 -%}{%- endif -%}
    {%- if ns.n < ns.last or not m.tool_calls -%}<think></think>
    {%- else -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}
  {%- endif -%}
  {{- m.content -}}
  {%- for c in m.tool_calls -%}{{- '<|tool_call_begin|>' + c.function.name + '<|tool_call_end|>' -}}{%- endfor -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>{%- endif -%}"""


def test_kimi_k25_opens_reasoning_in_its_generation_prompt(tmp_path: Path) -> None:
    """There <think> is no token that the model writes, and an empty block is the template's own."""
    for file in tokenizer("kimi-k2-thinking").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(KIMI_K25)
    rows = encoder(tmp_path, trust_remote_code=True)
    assert rows.masker.rule is not None
    assert rows.masker.rule.prompt_tail == "<think>"
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First.", "reasoning_content": "Left out."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "", "reasoning_content": "Why.", "tool_calls": [{"function": {"name": "f"}}]},
    ]
    encoded = encode(rows, {"messages": turns})
    expected = ["First.<|im_end|>", "Why.</think><|tool_call_begin|>f<|tool_call_end|><|im_end|>"]
    assert supervised(rows, encoded) == expected
    assert encoded.how == "prefixes"
    text = rows.template.render(parse({"messages": turns}, Columns(), "x").messages, None)  # type: ignore[union-attr]
    assert [text[a:b] for a, b in rows.masker.by_family(text, turns)] == expected
