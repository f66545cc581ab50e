"""What is wrong with a setting, where, and what would be right: how every part of the pool file reports its errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

Path: TypeAlias = tuple[str | int, ...]

_TYPE = "fault"
_MISSING = "missing"
_EXPECTED = {
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected text",
    "list": "expected a list",
    "tuple": "expected a list",
    "dict": "expected a mapping of `key: value`",
    "model": "expected a mapping of `key: value`",
}


class UsageError(Exception):
    """Wrong usage: options or files that a command cannot work with. The message says what would be right.

    Commands print it and exit 2, before anything has happened.
    """


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing wrong in the settings.

    Parameters
    ----------
    path
        Keys and list indexes that lead to it, from the settings that are checked.
    message
        What is wrong. Never shows a value that could be a secret.
    hint
        What would be right; empty where the message says it already.
    at_key
        True where the key itself is wrong, not its value.
    """

    path: Path
    message: str
    hint: str = ""
    at_key: bool = False

    def below(self, *path: str | int) -> Issue:
        """Return the same fault as seen from further out, `path` leading to where it was."""
        return replace(self, path=(*path, *self.path))


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint that names the nearest of `known`, or all of them if none is near.

    Parameters
    ----------
    cutoff
        Similarity (`difflib`'s ratio, 0 to 1) from which a word is near.
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    if near:
        return _meant(near[0])
    return f"known here: {', '.join(names)}" if names else "nothing is known here"


def _meant(word: str) -> str:
    return f"did you mean '{word}'?"


def error_of(title: str, issues: Sequence[Issue]) -> ValidationError:
    """Return the pydantic error that carries `issues` (at least one); a validator that raises it keeps their paths."""
    return ValidationError.from_exception_data(
        title,
        [
            InitErrorDetails(
                type=PydanticCustomError(
                    _TYPE, "{message}", {"message": issue.message, "hint": issue.hint, "at_key": issue.at_key}
                ),
                loc=issue.path,
                input=None,
            )
            for issue in issues
        ],
        hide_input=True,
    )


def issues_of(error: ValidationError, model: type[BaseModel]) -> list[Issue]:
    """Return what `error`, raised while validating `model`, says, in plain words and with hints.

    Notes
    -----
    The values themselves are left out, since they may be secrets, but for the words of a fixed set that nearly fit.
    """
    found = [_fault_of(details, model) for details in error.errors(include_url=False)]
    # `metod: ngram` is one slip: not also a missing `method`.
    meant = {(*issue.path[:-1], issue.hint) for issue in found if issue.at_key}
    return [
        issue
        for issue in found
        if issue.message != _MISSING or (*issue.path[:-1], _meant(str(issue.path[-1]))) not in meant
    ]


def _fault_of(details: ErrorDetails, model: type[BaseModel]) -> Issue:
    path, kind, context = details["loc"], details["type"], details.get("ctx", {})
    if path and path[-1] == "[key]":  # pydantic's way to say that a mapping's key is meant, not its value
        return Issue(path[:-1], _message(kind, context, details["msg"]), at_key=True)
    if kind == _TYPE:
        return Issue(path, context["message"], context["hint"], context["at_key"])
    if kind == "extra_forbidden":
        owner = _model_at(model, path[:-1])
        return Issue(path, "unknown key", did_you_mean(str(path[-1]), owner.model_fields if owner else ()), at_key=True)
    if kind in {"enum", "literal_error"}:
        return _choice_fault(path, details["input"], context["expected"])
    quote = "put it in quotes" if kind == "string_type" and isinstance(details["input"], int | float) else ""
    return Issue(path, _message(kind, context, details["msg"]), quote)


def _message(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "missing":
        return _MISSING
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return f"needs {context['min_length']} at least, has {context['actual_length']}"
    expected = _EXPECTED.get(kind.split("_", maxsplit=1)[0])
    if expected and kind.endswith(("_type", "_parsing", "_from_float")):
        return expected
    return message.replace("Input should be", "must be").replace("String should", "must")


def _choice_fault(path: Path, given: object, expected: str) -> Issue:
    choices = [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]
    if not isinstance(given, str):
        return Issue(path, "expected one word", f"one of {', '.join(choices)}")
    near = difflib.get_close_matches(given, choices, n=1)
    return Issue(path, f"unknown '{given}'", _meant(near[0]) if near else f"one of {', '.join(choices)}")


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Follow `path` through the annotations of `model`; None where it leads to no model."""
    annotation: Any = model
    for step in path:
        candidates = [choice for choice in _choices(annotation) if _follow(choice, step) is not None]
        if not candidates:
            return None
        annotation = _follow(candidates[0], step)
    return next((choice for choice in _choices(annotation) if _is_model(choice)), None)


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return [annotation]


def _follow(annotation: Any, step: str | int) -> Any:
    if _is_model(annotation):
        field = annotation.model_fields.get(step)
        return field.annotation if field else None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if not isinstance(origin, type) or not arguments:
        return None
    if issubclass(origin, Mapping):
        return arguments[1] if len(arguments) == 2 else None
    return arguments[0] if issubclass(origin, Sequence) and isinstance(step, int) else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
