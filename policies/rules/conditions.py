"""The conditions of a rule: what may be asked of a request, how it is written, and whether it holds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from backends.validation import Issue, did_you_mean, error_of
from policies.features.request import WORKLOAD, Endpoint

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_COMPARISON = rf"(?:>=|<=|==?|>|<)\s*{_NUMBER}"
_BOUNDS = rf"\s*{_COMPARISON}(?:\s+and\s+{_COMPARISON})?\s*"
_PARTS = re.compile(rf"(>=|<=|==?|>|<)\s*({_NUMBER})")
_EXAMPLE = "write a comparison such as '>= 0.5', or two such as '>= 0.2 and < 0.5'"


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers, written as one comparison or two: `>= 0.35`, `> 0 and <= 0.5`, `= 1`."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    @classmethod
    def parse(cls, given: object) -> Bounds:
        """Read what a person wrote; a bare number means exactly that number.

        Raises
        ------
        ValueError
            If it is no comparison, or no number can satisfy it.
        """
        if isinstance(given, Bounds):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            return cls(given, given)
        if not isinstance(given, str) or not re.fullmatch(_BOUNDS, given):
            raise ValueError(f"{_shown(given)} is no condition on a number: {_EXAMPLE}")
        bounds = cls()
        for operator, number in _PARTS.findall(given):
            bounds = bounds._narrowed(operator, float(number))
        if bounds.is_empty():
            raise ValueError(f"{_shown(given)} can never hold: {_EXAMPLE}")
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
        """Tell whether no number is within."""
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def meets(self, least: float, most: float) -> bool:
        """Tell whether some number from `least` to `most` is within."""
        low, low_open = max((self.low, self.low_open), (least, False))
        high, high_closed = min((self.high, not self.high_open), (most, True))
        return not Bounds(low, high, low_open, not high_closed).is_empty()

    def holds(self, value: float | None) -> bool:
        """Tell whether a number is within; no number (a request without a limit) never is."""
        if value is None or value < self.low or value > self.high:
            return False
        return not (self.low_open and value == self.low) and not (self.high_open and value == self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {self.low:g}"
        parts = [f"{'>' if self.low_open else '>='} {self.low:.12g}"] if self.low > -math.inf else []
        parts += [f"{'<' if self.high_open else '<='} {self.high:.12g}"] if self.high < math.inf else []
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Words:
    """A choice of words, written as one or as a list: `chat`, `[code, agent]`."""

    words: frozenset[str]

    @classmethod
    def parse(cls, given: object) -> Words:
        """Read what a person wrote.

        Raises
        ------
        ValueError
            If it is neither text nor a list of texts.
        """
        if isinstance(given, Words):
            return given
        listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        for word in listed:
            if not isinstance(word, str):
                raise ValueError(f"{_shown(word)} is not text: put it in quotes")  # noqa: TRY004 -- for pydantic
        if not listed:
            raise ValueError("an empty list can never hold: name one word at least")
        return cls(frozenset(listed))

    def holds(self, value: str) -> bool:
        """Tell whether a word is among them."""
        return value in self.words

    def listed(self) -> list[str]:
        """Return the words in order."""
        return sorted(self.words)

    def __str__(self) -> str:
        return " or ".join(self.listed())


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."


Range = Annotated[
    Bounds,
    PlainValidator(Bounds.parse),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": f"^{_BOUNDS}$"}, {"type": "number"}]}),
]
Choice = Annotated[
    Words,
    PlainValidator(Words.parse),
    PlainSerializer(Words.listed, return_type=list[str]),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]

_SHARES = frozenset({"overlap", "code_share"})
_FROM_ONE = frozenset({"n", "turns"})
_WORDS = {
    "template": (re.compile(r"[0-9a-f]{8}"), "a template is eight hex digits, as /admin/explain shows them"),
    "workload": (WORKLOAD, "a workload is in lower case: letters, digits, '.', '_' and '-', at most 40"),
    "endpoint": (re.compile("|".join(Endpoint)), f"the endpoints are {', '.join(Endpoint)}"),
}


class When(BaseModel):
    """The conditions of a rule, all of which must hold; a rule without any always holds.

    Numbers take a comparison or two (`">= 0.2 and < 0.5"`), words one or a list of which one must be met, and the rest
    true or false.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Range | None = Field(None, description="Sampling temperature; the model's default where none is sent.")
    top_p: Range | None = Field(None, description="Nucleus sampling; 1 where none is sent.")
    overlap: Range | None = Field(None, description="Share of the prompt's 3-grams seen earlier in it, 0 to 1.")
    code_share: Range | None = Field(None, description="Share of the prompt's lines that look like code, 0 to 1.")
    prompt_tokens: Range | None = Field(None, description="Length of the prompt in tokens, estimated.")
    max_tokens: Range | None = Field(None, description="Limit on output tokens; never holds where there is none.")
    turns: Range | None = Field(None, description="Messages but for the system prompt.")
    n: Range | None = Field(None, description="Sequences asked for.")
    qps: Range | None = Field(None, description="Requests a second for this model.")
    in_flight: Range | None = Field(None, description="Requests of this model under way.")
    in_flight_per_backend: Range | None = Field(
        None, description="Requests on a backend, others' included, as the mean of those that may take this one."
    )
    stream: StrictBool | None = Field(None, description="Whether the answer is streamed.")
    structured: StrictBool | None = Field(None, description="Whether the answer is bound to a grammar.")
    tools: StrictBool | None = Field(None, description="Whether tools may be called.")
    endpoint: Choice | None = Field(None, description="The API: chat, completions, responses, messages ...")
    template: Choice | None = Field(None, description="What requests of one application share: eight hex digits.")
    workload: Choice | None = Field(None, description="What the client declares in x-gateway-workload.")

    @model_validator(mode="before")
    @classmethod
    def _known_and_not_null(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        issues = list(_key_faults(data, cls.model_fields))
        if issues:
            raise error_of(cls.__name__, issues)
        return data

    @field_validator("*")
    @classmethod
    def _can_hold(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, Bounds):
            least, most = float(name in _FROM_ONE), 1.0 if name in _SHARES else math.inf
            if not value.meets(least, most):
                raise ValueError(f"'{value}' can never hold: {name} runs from {least:g} to {most:g}")
        elif isinstance(value, Words):
            pattern, right = _WORDS[name]
            for word in sorted(value.words):
                if not pattern.fullmatch(word):
                    raise ValueError(f"{_shown(word)} can never hold: {right}")
        return value

    def conditions(self) -> dict[str, Bounds | Words | bool]:
        """Return the conditions there are, by feature."""
        pairs = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: condition for name, condition in pairs if condition is not None}

    def __str__(self) -> str:
        parts = (f"{name} {_told(condition)}" for name, condition in self.conditions().items())
        return ", ".join(parts) or "always"


def _key_faults(data: Mapping[Any, Any], known: Iterable[str]) -> Iterator[Issue]:
    for name, condition in data.items():
        if name not in known:
            yield Issue((str(name),), f"unknown feature '{name}'", did_you_mean(str(name), known), at_key=True)
        elif condition is None:
            yield Issue((name,), "nothing stands here", "write a condition, or leave the feature out")


def _told(condition: Bounds | Words | bool) -> str:
    return str(condition).lower() if isinstance(condition, bool) else str(condition)
