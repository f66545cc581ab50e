"""Validation issues of the pool file and of options: a path, what is wrong, and a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

Path: TypeAlias = tuple[str | int, ...]

_TYPE = "issue"
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
    """Options or files that a command cannot use; the message says how to fix them.

    Raised before the command does anything; the CLI prints it and exits with status 2.
    """


@dataclass(frozen=True, slots=True)
class Issue:
    """One error in the settings.

    Examples
    --------
    >>> Issue(("prompt_lookup_min",), "must be positive").below("backends", 0).path
    ('backends', 0, 'prompt_lookup_min')
    """

    path: Path  # keys and list indexes from the root of the validated settings to the error
    message: str  # what is wrong, without values that could be secrets
    hint: str = ""  # how to fix it; empty if the message already says so
    at_key: bool = False  # whether the key itself is wrong, not its value

    def below(self, *path: str | int) -> Issue:
        """Return the same issue with `path` prepended to its path."""
        return replace(self, path=(*path, *self.path))

    def __str__(self) -> str:
        """Return one line: path, message and hint."""
        text = f"{'.'.join(map(str, self.path))}: {self.message}" if self.path else self.message
        return f"{text}; {self.hint}" if self.hint else text


class CheckedModel(BaseModel):
    """Base class of settings: unknown keys are errors, and it raises all errors together, each with its path."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield conflicts between keys of `data`, whose values may have wrong types."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        conflicts = list(cls.issues(data)) if isinstance(data, Mapping) else []
        try:
            settings = handler(data)
        except ValidationError as error:
            raise error_of(cls.__name__, [*issues_of(error, cls), *conflicts]) from None
        conflicts += [Issue(path, "expected a number, not true or false") for path in _mistaken(data, vars(settings))]
        if conflicts:
            raise error_of(cls.__name__, conflicts)
        return settings


def _mistaken(given: object, taken: object) -> Iterator[Path]:
    """Yield where true or false was taken for a number: pydantic takes `yes` for 1, and `off` for 0."""
    if isinstance(given, bool):
        if type(taken) in (int, float):
            yield ()
        return
    if isinstance(given, Mapping) and isinstance(taken, Mapping):
        pairs = [(key, given[key], taken[key]) for key in given if key in taken]
    elif isinstance(given, list) and isinstance(taken, list | tuple):
        pairs = [(index, *pair) for index, pair in enumerate(zip(given, taken, strict=False))]
    else:
        return
    for key, one, other in pairs:
        for path in _mistaken(one, other):
            yield (key, *path)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest of `known`, or all of them if none is close.

    Examples
    --------
    >>> did_you_mean("ngrm", ["ngram", "suffix"])
    "did you mean 'ngram'?"
    >>> did_you_mean("x", ["ngram", "suffix"])
    'known here: ngram, suffix'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return _suggestion(close[0])
    return f"known here: {', '.join(names)}" if names else "no name is known here"


def _suggestion(word: str) -> str:
    return f"did you mean '{word}'?"


def error_of(title: str, issues: Sequence[Issue]) -> ValidationError:
    """Return a pydantic error, for validators to raise, that carries `issues` (at least one) with their paths."""
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
    """Return the issues in `error`, which was raised while validating `model`.

    Omits values, as they may be secrets, except an unknown word where a fixed set is expected.

    Examples
    --------
    >>> class Settings(BaseModel):
    ...     k: int
    >>> try:
    ...     Settings.model_validate({"k": "many"})
    ... except ValidationError as error:
    ...     print(issues_of(error, Settings)[0].message)
    expected a whole number
    """
    issues = [_issue_of(details, model) for details in error.errors(include_url=False)]
    # `metod: ngram` is one typo: do not report the missing `method` as well.
    suggested = {(*issue.path[:-1], issue.hint) for issue in issues if issue.at_key}
    return [
        issue
        for issue in issues
        if issue.message != _MISSING or (*issue.path[:-1], _suggestion(str(issue.path[-1]))) not in suggested
    ]


def _issue_of(details: ErrorDetails, model: type[BaseModel]) -> Issue:
    path, kind, context = details["loc"], details["type"], details.get("ctx", {})
    if path and path[-1] == "[key]":  # pydantic's mark for a mapping's key rather than its value
        return Issue(path[:-1], _message(kind, context, details["msg"]), at_key=True)
    if kind == _TYPE:
        return Issue(path, context["message"], context["hint"], context["at_key"])
    if kind == "extra_forbidden":
        hint = did_you_mean(str(path[-1]), model.model_fields) if len(path) == 1 else ""
        return Issue(path, "unknown key", hint, at_key=True)
    if kind in {"enum", "literal_error"}:
        return _choice_issue(path, details["input"], context["expected"])
    hint = "put it in quotes" if kind == "string_type" and isinstance(details["input"], int | float) else ""
    if kind in {"model_type", "dict_type"} and isinstance(details["input"], str) and "{" in details["input"]:
        hint = "as text it must be JSON alone: double quotes, no flag before it"
    return Issue(path, _message(kind, context, details["msg"]), hint)


def _message(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "missing":
        return _MISSING
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return f"needs at least {context['min_length']}, has {context['actual_length']}"
    expected = _EXPECTED.get(kind.split("_", maxsplit=1)[0])
    if expected and kind.endswith(("_type", "_parsing", "_from_float")):
        return expected
    return message.replace("Input should be", "must be").replace("String should", "must")


def _choice_issue(path: Path, value: object, expected: str) -> Issue:
    choices = [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]
    if not isinstance(value, str):
        return Issue(path, "expected a word", f"one of {', '.join(choices)}")
    close = difflib.get_close_matches(value.lower(), choices, n=1)
    return Issue(path, f"unknown '{value}'", _suggestion(close[0]) if close else f"one of {', '.join(choices)}")
