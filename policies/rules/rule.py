"""The rules of the `thresholds` policy, as written in the pool file, and the default rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import ConfigDict, Field, field_validator, model_validator

from backends.backend import Candidate
from backends.speculation import Method
from backends.validation import CheckedModel, Issue, did_you_mean, error_of
from policies.rules.conditions import When

DEFAULT_RULES = Path(__file__).with_name("default_rules.yaml")

BACKEND = "backend:"
SPILLED = "spilled"
NONE_PREFERRED = "none_preferred"
NO_RULE = "no_rule"
RESERVED = frozenset({SPILLED, NONE_PREFERRED, NO_RULE})
"""Reasons of decisions that no rule made."""


Weight = Annotated[float, Field(gt=0)]


class Rule(CheckedModel):
    """A rule: conditions on a request, and the backends for requests that meet them, by preference or by weight.

    Examples
    --------
    >>> rule = Rule(name="code", when={"workload": "code"}, prefer=["suffix", "ngram"])
    >>> for line in rule.lines():
    ...     print(line)
    - name: code
      when: {workload: [code]}
      prefer: [suffix, ngram]
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prefer"]}, {"required": ["weights"]}]},
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")] = Field(
        description="Name, which decisions give as their reason: at most 40 of a-z, 0-9, '_' and '-'."
    )
    when: When = Field(default=When(), description="Conditions, all of which must hold; without any, the rule matches.")
    prefer: tuple[str, ...] = Field(
        default=(), description="Methods or `backend:NAME`, the best first.", json_schema_extra={"minItems": 1}
    )
    weights: dict[str, Weight] = Field(
        default={},
        description="Instead of `prefer`: the weight of each method or `backend:NAME`. The backend with the lowest "
        "(requests + 1 + slack) / weight is chosen.",
        json_schema_extra={"minProperties": 1},
    )
    slack: float | None = Field(default=None, ge=0, description="Slack of this rule, instead of `spill.slack`.")

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"'{name}' is reserved for decisions that no rule made: choose another name")
        return name

    @field_validator("prefer")
    @classmethod
    def _each_once(cls, prefer: tuple[str, ...]) -> tuple[str, ...]:
        issues = []
        for index, target in enumerate(prefer):
            if target in prefer[:index]:
                issues.append(Issue((index,), f"'{target}' is listed twice", "remove the second entry"))
            else:
                issues += _target_issues(target, index, at_key=False)
        if issues:
            raise error_of(cls.__name__, issues)
        return prefer

    @field_validator("weights")
    @classmethod
    def _methods_or_backends(cls, weights: dict[str, float]) -> dict[str, float]:
        if issues := [issue for target in weights for issue in _target_issues(target, target, at_key=True)]:
            raise error_of(cls.__name__, issues)
        return weights

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        issue = None
        if self.prefer and self.weights:
            issue = Issue(("weights",), "cannot be combined with `prefer`", "keep one of the two", at_key=True)
        elif not self.prefer and not self.weights:
            key = "weights" if "weights" in self.model_fields_set else "prefer"
            issue = Issue((key,), "names no target", "name a method or backend:NAME")
        if issue is not None:
            raise error_of(type(self).__name__, [issue])
        return self

    def weight_of(self, candidate: Candidate) -> float | None:
        """Return the weight of a candidate, or None; a weight by name takes precedence over one by method."""
        return self.weights.get(BACKEND + candidate.name) or self.weights.get(candidate.method)

    def lines(self) -> list[str]:
        """Return the rule as an entry of `rules` in a pool file."""
        lines = [f"- {yaml.safe_dump({'name': self.name}).strip()}"]  # in quotes, if it looks like a number
        if self.when.conditions():
            lines.append(f"  when: {_flow(self.when.model_dump(mode='json', exclude_none=True))}")
        if self.prefer:
            lines.append(f"  prefer: {_flow(list(self.prefer))}")
        else:
            lines.append(f"  weights: {_flow(self.weights)}")
        if self.slack is not None:
            lines.append(f"  slack: {self.slack:g}")
        return lines


def _target_issues(target: str, key: str | int, *, at_key: bool) -> Iterator[Issue]:
    if not target.removeprefix(BACKEND):
        yield Issue((key,), "names no backend", "write backend:NAME", at_key)
    elif not target.startswith(BACKEND) and target not in set(Method):
        hint = f"{did_you_mean(target, Method)}; a backend is written backend:NAME"
        yield Issue((key,), f"unknown method '{target}'", hint, at_key)


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()


@cache
def default_rules() -> tuple[Rule, ...]:
    """Return the rules used if the pool file has none."""
    return tuple(Rule.model_validate(rule) for rule in yaml.safe_load(DEFAULT_RULES.read_text("utf-8"))["rules"])
