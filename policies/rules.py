"""One rule of the `thresholds` policy as it stands in the pool file, and those that come with the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from backends.backend import Candidate
from backends.faults import Fault, did_you_mean, error_of
from backends.speculation import Method
from policies.conditions import When

DEFAULT_RULES = Path(__file__).with_name("default_rules.yaml")

BACKEND = "backend:"
SPILLED = "spilled"
NONE_PREFERRED = "none_preferred"
NO_RULE = "no_rule"
_RESERVED = frozenset({SPILLED, NONE_PREFERRED, NO_RULE})


class Rule(BaseModel):
    """Where requests go for which all conditions hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")] = Field(
        description="Told as the reason of a decision: a-z, 0-9, '_' and '-', at most 40."
    )
    when: When = Field(default=When(), description="Conditions, all of which must hold; none: always.")
    prefer: tuple[str, ...] = Field(
        description="Methods, or `backend:NAME`, the best first.", json_schema_extra={"minItems": 1}
    )

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name in _RESERVED:
            raise ValueError(f"'{name}' is the reason of decisions that no rule made: choose another name")
        return name

    @field_validator("prefer")
    @classmethod
    def _methods_or_backends(cls, prefer: tuple[str, ...]) -> tuple[str, ...]:
        faults = [] if prefer else [Fault((), "prefers nothing", "name a method, or backend:NAME")]
        for position, target in enumerate(prefer):
            if target in prefer[:position]:
                faults.append(Fault((position,), f"'{target}' stands here twice", "leave the second one out"))
            elif not target.removeprefix(BACKEND):
                faults.append(Fault((position,), "names no backend", "write backend:NAME"))
            elif not target.startswith(BACKEND) and target not in set(Method):
                hint = f"{did_you_mean(target, Method)}; a backend is written backend:NAME"
                faults.append(Fault((position,), f"unknown method '{target}'", hint))
        if faults:
            raise error_of(cls.__name__, faults)
        return prefer


def is_meant(target: str, candidate: Candidate) -> bool:
    """Tell whether an entry of `prefer` means this candidate."""
    return candidate.method == target or BACKEND + candidate.name == target


def by_target(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Return the candidates that each entry of a `prefer` would mean."""
    meant: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        meant.setdefault(candidate.method, []).append(candidate)
        meant[BACKEND + candidate.name] = [candidate]
    return meant


@cache
def default_rules() -> tuple[Rule, ...]:
    """Read the rules that come with the gateway."""
    return tuple(Rule.model_validate(rule) for rule in yaml.safe_load(DEFAULT_RULES.read_text("utf-8"))["rules"])
