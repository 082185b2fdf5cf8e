"""What is wrong with a configuration, in sentences that say what to write instead."""

import json
import typing
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tasks.extract.checks import REFUSED

Loc = tuple[int | str, ...]

# By what pydantic calls the problem, or by the part of that before the first underscore; names in braces are its own.
RULES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be settings, as in `name: value`",
    "path_type": "must be a path",
    "string_type": "must be a text",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
}


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """A line for each value that is refused.

    Args:
        error: what validating said.
        model: of the whole configuration.
    """
    problems = error.errors(include_url=False)
    # A list whose items are wrong is, for pydantic, also one that is too short.
    inner = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    return "\n".join(_sentence(problem, model) for problem in problems if problem["loc"] not in inner)


def _sentence(problem: ErrorDetails, model: type[BaseModel]) -> str:
    loc, kind, given = problem["loc"], problem["type"], problem["input"]
    place = _place(loc) or "the configuration"
    context: Mapping[str, Any] = problem.get("ctx", {})
    if kind == "missing":
        return f"{place} is missing{_described(loc, model)}"
    if kind == "extra_forbidden":
        return _unknown(loc, given, model)
    if kind == "value_error":
        said = str(context["error"])
        return said if said.startswith(place) else f"{place}: {said}"
    if kind in ("too_short", "string_too_short"):
        return f"{place} must not be empty"
    if kind in ("model_type", "model_attributes_type"):
        return f"{place} must hold settings, not {_shown(given)}; known are {_names(_model_at(loc, model) or model)}"
    rule = RULES.get(kind) or RULES.get(kind.partition("_")[0])
    if rule is None:
        return f"{place}: {problem['msg'].replace('Input', 'the value')}, not {_shown(given)}"
    return f"{place} {rule.format(**context)}, not {_shown(given)}"


def _unknown(loc: Loc, given: Any, model: type[BaseModel]) -> str:
    """A setting that does not exist: the nearest that does, where it belongs, and which there are."""
    *where, name = loc
    name = str(name)
    inside = _model_at(tuple(where), model) or model
    if where == ["engine"] and name in REFUSED:
        harmless, reason = REFUSED[name]
        return f"engine.{name} cannot be set" + ("; remove it" if given in harmless else f": {reason}")
    known = f"known are {_names(inside)}"
    if where == ["engine"]:
        known += f"; another argument of vLLM goes under `engine: {{extra: {{{name}: ...}}}}`"
    if near := get_close_matches(name, inside.model_fields, 1):
        hint = f"perhaps `{near[0]}`; "
    else:
        places = [place for place, other in _sections(model) if name in other.model_fields]
        hint = f"it belongs under `{places[0]}`; " if places else ""
    return f"there is no setting {_place(loc)}: {hint}{known}"


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name in model.model_fields:
        if (section := _model_at((name,), model)) is not None:
            yield name, section


def _model_at(loc: Loc, model: type[BaseModel]) -> type[BaseModel] | None:
    """The model that holds the settings at a place."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        found = None if field is None else next(_models(field.annotation), None)
        if found is None:
            return None
        model = found
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _described(loc: Loc, model: type[BaseModel]) -> str:
    """What a setting is for; of a section, what it holds."""
    if (section := _model_at(loc, model)) is not None:
        return f"; it holds {_names(section)}"
    inside = _model_at(loc[:-1], model)
    field = None if inside is None else inside.model_fields.get(str(loc[-1]))
    return f": {field.description}" if field is not None and field.description else ""


def _names(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _place(loc: Loc) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."
