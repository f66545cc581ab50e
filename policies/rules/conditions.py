"""The conditions of a rule: parses, checks and writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from backends.validation import CheckedModel, Issue, error_of
from policies.features.request import WORKLOAD_NAME, Endpoint

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COMPARISON = rf"(?:>=|<=|==?|>|<)\s*{_NUMBER}"
_BOUNDS = rf"\s*{_COMPARISON}(?:\s+and\s+{_COMPARISON})?\s*"
_PARTS = re.compile(rf"(>=|<=|==?|>|<)\s*({_NUMBER})")
_EXAMPLE = "write a comparison such as '>= 0.5', or two such as '>= 0.2 and < 0.5'"


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers, written as one or two comparisons: `>= 0.35`, `> 0 and <= 0.5`, `= 1`."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    @classmethod
    def parse(cls, value: object) -> Bounds:
        """Parse a comparison; a bare number means equality."""
        if isinstance(value, Bounds):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(value, value)
        if not isinstance(value, str) or not re.fullmatch(_BOUNDS, value):
            raise ValueError(f"{_shown(value)} is not a condition on a number: {_EXAMPLE}")
        bounds = cls()
        for operator, number in _PARTS.findall(value):
            bounds = bounds._narrowed(operator, float(number))
        if bounds.is_empty():
            raise ValueError(f"{_shown(value)} can never hold: {_EXAMPLE}")
        return bounds

    def _narrowed(self, operator: str, number: float) -> Bounds:
        low, high, low_open, high_open = self.low, self.high, self.low_open, self.high_open
        is_open = operator in (">", "<")
        if operator in (">", ">=", "=", "==") and (number, is_open) > (low, low_open):
            low, low_open = number, is_open
        if operator in ("<", "<=", "=", "==") and (-number, is_open) > (-high, high_open):
            high, high_open = number, is_open
        return Bounds(low, high, low_open, high_open)

    def is_empty(self) -> bool:
        """Return whether no number is within the bounds."""
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def overlaps(self, minimum: float, maximum: float) -> bool:
        """Return whether some number from `minimum` to `maximum` is within the bounds."""
        low, low_open = max((self.low, self.low_open), (minimum, False))
        high, high_closed = min((self.high, not self.high_open), (maximum, True))
        return not Bounds(low, high, low_open, not high_closed).is_empty()

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {self.low:g}"
        parts = [f"{'>' if self.low_open else '>='} {self.low:.12g}"] if self.low > -math.inf else []
        parts += [f"{'<' if self.high_open else '<='} {self.high:.12g}"] if self.high < math.inf else []
        return " and ".join(parts)


def _words(value: object) -> frozenset[str]:
    """Parse a word or a list of words."""
    words: list[Any] = list(value) if isinstance(value, list | tuple | frozenset) else [value]
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f"{_shown(word)} is not text: put it in quotes")  # noqa: TRY004 -- for pydantic
    if not words:
        raise ValueError("an empty list can never hold: name at least one word")
    return frozenset(words)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Range = Annotated[
    Bounds,
    PlainValidator(Bounds.parse),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": f"^{_BOUNDS}$"}, {"type": "number"}]}),
]
Choice = Annotated[
    frozenset[str],
    PlainValidator(_words),
    PlainSerializer(sorted, return_type=list[str]),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]

Condition = Bounds | frozenset[str] | bool
"""A condition on a number, on a word, or on a boolean."""

_SHARES = frozenset({"overlap", "code_share"})
_COUNTS_FROM_ONE = frozenset({"n", "turns"})
_WORDS = {
    "template": (re.compile(r"[0-9a-f]{8}"), "a template is eight hex digits, as shown by /admin/explain"),
    "workload": (WORKLOAD_NAME, "a workload has at most 40 characters: lower-case letters, digits, '.', '_' and '-'"),
    "endpoint": (re.compile("|".join(Endpoint)), f"the endpoints are {', '.join(Endpoint)}"),
}


class When(CheckedModel):
    """Conditions, all of which must hold; without any, the rule always matches.

    A condition on a number is one or two comparisons (`">= 0.2 and < 0.5"`). A condition on a word is a word or a list
    of alternatives. Any other condition is true or false.
    """

    temperature: Range | None = Field(None, description="Sampling temperature; the model's default if not sent.")
    top_p: Range | None = Field(None, description="Nucleus sampling probability; 1 if not sent.")
    overlap: Range | None = Field(None, description="Share of the prompt that repeats earlier parts of it, 0 to 1.")
    code_share: Range | None = Field(None, description="Share of the prompt's lines that look like code, 0 to 1.")
    prompt_tokens: Range | None = Field(None, description="Estimated length of the prompt in tokens.")
    context_tokens: Range | None = Field(
        None, description="Tokens that the context reaches: the prompt and an answer of 220, or of max_tokens if fewer."
    )
    max_tokens: Range | None = Field(None, description="Limit on output tokens; a request without one never matches.")
    turns: Range | None = Field(None, description="Number of messages, without the system prompt.")
    n: Range | None = Field(None, description="Number of sequences requested.")
    qps: Range | None = Field(None, description="Requests per second for this model.")
    in_flight: Range | None = Field(None, description="Requests in flight for this model.")
    in_flight_per_backend: Range | None = Field(
        None, description="Mean number of requests on the eligible backends, including those of other clients."
    )
    stream: StrictBool | None = Field(None, description="Whether the answer is streamed.")
    structured: StrictBool | None = Field(None, description="Whether the output is constrained, e.g. by a JSON schema.")
    tools: StrictBool | None = Field(None, description="Whether the model may call tools.")
    thinking: StrictBool | None = Field(
        None, description="Whether thinking is asked for, or asked to be left out; one that says nothing never matches."
    )
    endpoint: Choice | None = Field(None, description="The API: chat, completions, responses, messages ...")
    template: Choice | None = Field(None, description="Template of the request's application: eight hex digits.")
    workload: Choice | None = Field(None, description="Workload that the client declares in x-gateway-workload.")

    @model_validator(mode="before")
    @classmethod
    def _not_null(cls, data: Any) -> Any:
        absent = [name for name, condition in data.items() if condition is None] if isinstance(data, Mapping) else []
        if absent:
            hint = "write a condition, or remove the feature"
            raise error_of(cls.__name__, [Issue((str(name),), "no condition is given", hint) for name in absent])
        return data

    @field_validator("*")
    @classmethod
    def _can_hold(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, Bounds):
            minimum, maximum = float(name in _COUNTS_FROM_ONE), 1.0 if name in _SHARES else math.inf
            if not value.overlaps(minimum, maximum):
                raise ValueError(f"'{value}' can never hold: {name} ranges from {minimum:g} to {maximum:g}")
        elif isinstance(value, frozenset):
            pattern, hint = _WORDS[name]
            for word in sorted(value):
                if not pattern.fullmatch(word):
                    raise ValueError(f"{_shown(word)} can never hold: {hint}")
        return value

    def conditions(self) -> dict[str, Condition]:
        """Return the conditions by feature."""
        pairs = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: condition for name, condition in pairs if condition is not None}

    def __str__(self) -> str:
        parts = (f"{name} {_as_text(condition)}" for name, condition in self.conditions().items())
        return ", ".join(parts) or "always"


def _as_text(condition: Condition) -> str:
    if isinstance(condition, frozenset):
        return " or ".join(sorted(condition))
    return str(condition).lower() if isinstance(condition, bool) else str(condition)
