"""From a row of the user's data to a conversation in the one form that chat templates take."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tasks.tokenize.config import Columns
from tasks.tokenize.errors import BadRow

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
TEMPLATE_ROLES = frozenset(ROLES.values())
CALL_ROLES = frozenset({"function_call", "tool_call"})  # ShareGPT: the turn's text is a call as JSON

# (field with the turns, field of the speaker, field of the text)
OPENAI = ("role", "content")
SHAREGPT = ("from", "value")
TURN_FIELDS = ("messages", "conversations", "conversation")

UNUSABLE = re.compile("[\x00\ud800-\udfff]")
EXAMPLE_CHARS = 200


@dataclass(frozen=True)
class Conversation:
    """Turns in the form of OpenAI's chat format; arguments of tool calls are objects, not JSON strings."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unread: str = ""
    """What the row holds of another schema, and is not read; so in the others."""


@dataclass(frozen=True)
class PlainText:
    """A text without turns; every token of it is supervised."""

    id: str
    text: str
    unread: str = ""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids that the user made."""

    id: str
    input_ids: npt.NDArray[np.int64]
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]; all true where the row has none"""
    masked: bool = field(default=False)
    """Whether the mask came with the row."""
    unread: str = ""


Item = Conversation | PlainText | Tokens


def decode(line: bytes) -> Mapping[str, Any]:
    """The object on a JSONL line.

    Raises:
        BadRow: the line is no JSON object in UTF-8.
    """
    try:
        row = json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as e:
        raise BadRow("json", f"not UTF-8: {e.reason} at byte {e.start}") from None
    except json.JSONDecodeError as e:  # it counts lines too, from this one
        raise BadRow("json", f"not JSON: {e.msg.removesuffix(' at')} at column {e.pos + 1}") from None
    except (RecursionError, ValueError) as e:
        raise BadRow("json", f"not JSON: {e}") from None
    if not isinstance(row, dict):
        raise BadRow("json", f"a JSON object is needed, not {kind(row)}")
    return row


def parse(row: Mapping[str, Any], columns: Columns, default_id: str) -> Item:
    """Recognise the schema of a row and bring it into the one form.

    Raises:
        BadRow: the row fits no schema, or a value has the wrong type.
    """
    item_id = _id(row.get(columns.id), default_id)
    fields = (columns.messages,) if columns.messages else TURN_FIELDS
    used, *others = [n for n in ("input_ids", *fields, columns.text) if row.get(n) is not None] or [""]
    if used == columns.messages:
        others = []  # it was asked for by name
    unread = f"{' and '.join(f'`{n}`' for n in others)} beside `{used}`" if others else ""
    if used == "input_ids":
        return replace(_tokens(item_id, row), unread=unread)
    if used in fields:
        found = _conversation(item_id, used, _unpacked(row[used]), _unpacked(row.get(columns.tools)), columns)
        return replace(found, unread=unread)
    if used:
        text = row[used]
        if not isinstance(text, str):
            raise BadRow("type", f"`{columns.text}` must be a string, not {kind(text)}")
        check_text(text, f"`{columns.text}`")
        if not text:
            raise BadRow("empty", f"`{columns.text}` is empty")
        return PlainText(item_id, text)
    names = ", ".join(f"`{n}`" for n in (*fields, columns.text, "input_ids"))
    raise BadRow("schema", f"none of {names} in the row; name the fields under `columns`. The row: {example(row)}")


def _id(value: Any, default: str) -> str:
    if value is None or value == "":
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow("type", f"`id` must be a string or an integer, not {kind(value)}")
    text = str(value)
    check_text(text, "`id`")
    return text


def _tokens(item_id: str, row: Mapping[str, Any]) -> Tokens:
    ids = row["input_ids"]
    if not isinstance(ids, list | tuple | np.ndarray):
        raise BadRow("type", f"`input_ids` must be a list of integers, not {kind(ids)}")
    if len(ids) == 0:
        raise BadRow("empty", "`input_ids` is empty")
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise BadRow("type", f"`input_ids[{position}]` must be an integer, not {kind(value)}")
        if not 0 <= value < 2**31:
            raise BadRow("vocabulary", f"`input_ids[{position}]` is {value}, which is no token id")
    mask = row.get("loss_mask")
    if mask is None:
        return Tokens(item_id, np.asarray(ids, dtype=np.int64), np.ones(len(ids), dtype=np.bool_))
    if not isinstance(mask, list | tuple | np.ndarray):
        raise BadRow("type", f"`loss_mask` must be a list, not {kind(mask)}")
    if len(mask) != len(ids):
        raise BadRow("loss-mask", f"`loss_mask` has {len(mask)} entries for {len(ids)} `input_ids`")
    for position, value in enumerate(mask):
        if not isinstance(value, bool | int | np.bool_ | np.integer) or value not in (0, 1):
            raise BadRow("loss-mask", f"`loss_mask[{position}]` must be 0, 1, true or false, not {kind(value)}")
    return Tokens(item_id, np.asarray(ids, dtype=np.int64), np.asarray(mask, dtype=np.bool_), masked=True)


def _unpacked(value: Any) -> Any:
    """Lists that a column format without nested types keeps as JSON text."""
    if isinstance(value, str) and value.strip() in ("", "null"):
        return None
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _conversation(item_id: str, name: str, turns: Any, tools: Any, columns: Columns) -> Conversation:
    if not isinstance(turns, list | tuple | np.ndarray):
        raise BadRow("type", f"`{name}` must be a list of turns, not {kind(turns)}")
    if len(turns) == 0:
        raise BadRow("empty", f"`{name}` has no turn")
    messages = [_message(turn, f"`{name}[{i}]`", columns) for i, turn in enumerate(turns)]
    if not any(m["role"] == "assistant" for m in messages):
        spoken = ", ".join(dict.fromkeys(str(turn[_fields(turn, name, columns)[0]]) for turn in turns))
        detail = f"the conversation has no assistant turn, so nothing to supervise; its roles are: {spoken}"
        if not all(m["role"] in TEMPLATE_ROLES for m in messages):
            detail += " (what other roles mean is said under `columns.roles`)"
        raise BadRow("no-assistant", detail)
    return Conversation(item_id, messages, _tools(tools, columns.tools))


def _message(turn: Any, where: str, columns: Columns) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow("type", f"{where} must be an object, not {kind(turn)}")
    role_field, content_field = _fields(turn, where, columns)
    spoken = turn.get(role_field)
    if not isinstance(spoken, str):
        raise BadRow("type", f"{where}: `{role_field}` must be a string, not {kind(spoken)}")
    role = columns.roles.get(spoken) or ROLES.get(spoken)
    content = turn.get(content_field)
    if spoken in CALL_ROLES and role is None:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content, where)}
    if content is None and not (spoken == "assistant" or role == "assistant"):
        raise BadRow("type", f"{where}: a {spoken} turn needs `{content_field}`")
    message: Message = {"role": role or spoken, "content": _content(content, f"{where}: `{content_field}`")}
    check_text(message["role"], f"{where}: `{role_field}`")
    for key, value in turn.items():
        if key in (role_field, content_field) or value is None:
            continue  # templates ask `'name' in message`: an empty value must not be there
        if key == "tool_calls":
            if len(value):
                message["tool_calls"] = _calls(value, where)
        elif key == "reasoning":
            message.setdefault("reasoning_content", _text(value, f"{where}: `{key}`"))
        elif key == "reasoning_content":
            message[key] = _text(value, f"{where}: `{key}`")
        else:
            check_value(value, f"{where}: `{key}`")
            message[key] = value
    return message


def _fields(turn: Mapping[str, Any], where: str, columns: Columns) -> tuple[str, str]:
    if columns.role or columns.content:
        return columns.role or "role", columns.content or "content"
    for fields in (OPENAI, SHAREGPT):
        if fields[0] in turn:
            return fields
    raise BadRow(
        "schema",
        f"{where} has neither `role`/`content` nor `from`/`value`; name the fields under `columns`. "
        f"The turn: {example(turn)}",
    )


def _content(content: Any, where: str) -> Any:
    """Text, or a list of at least two text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, list | tuple | np.ndarray):
        raise BadRow("type", f"{where} must be a string, a list of parts or null, not {kind(content)}")
    parts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            parts.append(_text(part, f"{where}[{i}]"))
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            parts.append(_text(part["text"], f"{where}[{i}]"))
        elif isinstance(part, Mapping):
            raise BadRow("content-part", f"{where}[{i}] is of type {part.get('type')!r}; only text can be tokenized")
        else:
            raise BadRow("type", f"{where}[{i}] must be a text part, not {kind(part)}")
    if len(parts) < 2:
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} for part in parts]


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise BadRow("tool-call", f"{where}: the call is not JSON: {e}") from None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple | np.ndarray):
        raise BadRow("tool-call", f"{where}: `tool_calls` must be a list, not {kind(value)}")
    return [_call(call, f"{where}: `tool_calls[{i}]`") for i, call in enumerate(value)]


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise BadRow("tool-call", f"{where} must be an object, not {kind(call)}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = call
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise BadRow("tool-call", f"{where} has no function name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as e:
            raise BadRow("tool-call", f"{where}: `arguments` are not JSON: {e}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise BadRow("tool-call", f"{where}: `arguments` must be a JSON object, not {kind(arguments)}")
    checked: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        checked = {"id": call["id"], **checked}
    check_value(checked, where)
    return checked


def _tools(tools: Any, name: str) -> list[dict[str, Any]] | None:
    if tools is None or (isinstance(tools, list | tuple | np.ndarray) and len(tools) == 0):
        return None
    if not isinstance(tools, list | tuple | np.ndarray):
        raise BadRow("type", f"`{name}` must be a list of tool schemas, not {kind(tools)}")
    checked: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRow("type", f"`{name}[{i}]` must be an object, not {kind(tool)}")
        check_value(tool, f"`{name}[{i}]`")
        checked.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)})
    return checked


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRow("type", f"{where} must be a string, not {kind(value)}")
    check_text(value, where)
    return value


def check_text(text: str, where: str) -> None:
    """Refuse characters that no tokenizer can represent faithfully.

    Raises:
        BadRow: the text holds NUL or half of a surrogate pair.
    """
    if text.isascii() and "\x00" not in text:
        return
    found = UNUSABLE.search(text)
    if found:
        what = "a NUL character" if found[0] == "\x00" else f"half of a surrogate pair (U+{ord(found[0]):04X})"
        raise BadRow("characters", f"{where} holds {what} at character {found.start()}")


def check_value(value: Any, where: str) -> None:
    """:func:`check_text` over every string of a JSON value."""
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_text(str(key), where)
            check_value(inner, where)
    elif isinstance(value, Sequence):
        for inner in value:
            check_value(inner, where)


def kind(value: Any) -> str:
    """A JSON value's type and, if short, the value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value is None:
        return "null"
    name = names.get(type(value), type(value).__name__)
    return f"{name} ({value!r})" if isinstance(value, str | int | float) and len(repr(value)) < 40 else name


def example(row: Mapping[str, Any]) -> str:
    """The start of a row as JSON."""
    text = json.dumps(row, default=str)
    return text if len(text) <= EXAMPLE_CHARS else text[:EXAMPLE_CHARS] + "..."


def unknown_role(role: str) -> str:
    """What is wrong with a role that no format has, and what to do."""
    near = get_close_matches(role.lower(), ROLES, 1, cutoff=0.8)
    guess = f", perhaps {near[0]!r}" if near else ""
    known = ", ".join(ROLES)
    return (
        f"the role {role!r} is in no known format{guess}, nor in the chat template; known are {known}; say what "
        "others mean under `columns.roles`"
    )


def text_of(message: Message) -> str:
    """What a turn says, without reasoning and tool calls."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(cast(str, part["text"]) for part in content)


def printable(text: str) -> str:
    """The text with characters that would steer the terminal made visible."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 0xFF else f"\\x{ord(c):02x}" for c in text)
