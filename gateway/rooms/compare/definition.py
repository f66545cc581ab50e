"""What an operator asks to compare, as it is stored and shared by all gateways of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self
from uuid import uuid4

from pydantic import Field, model_validator

from backends.backend import Backend
from backends.validation import CheckedModel, did_you_mean
from policies.experiment.experiment import Plan
from policies.experiment.verdict import Stage


class WrongArmsError(ValueError):
    """Raised when the replicas that are to be compared are not there, or are not apart."""


class Question(CheckedModel):
    """What to compare, and for how long."""

    a: str = Field(default="", description="Replicas of the first arm: names, or a method, with commas between them.")
    b: str = Field(default="", description="Replicas of the second arm.")
    depths: list[Annotated[int, Field(ge=0, le=64)]] = Field(
        default=[],
        max_length=8,
        description="In place of a and b: numbers of drafted tokens, among which replicas with `draft_depth` change.",
    )
    for_s: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = Field(
        default=7200.0, description="Seconds until it ends if nothing is certain; null: until it is stopped."
    )
    until: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.02, description="Relative difference that is of no interest: it ends once the arms differ by less."
    )
    block_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        default=60.0, description="Seconds of a block of time, at least eight times the mean time of a request."
    )
    explore: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.25, description="By how much more an arm gets in some blocks, which shows other loads."
    )
    usual: bool = Field(
        default=True,
        description="Whether in one block of six the pool serves as usual, which shows what comparing costs.",
    )


class Definition(Question):
    """A comparison that was begun."""

    id: str = Field(default_factory=lambda: uuid4().hex[:12])
    began_s: float
    ended_s: float | None = None
    stage: Stage = Stage.RUNNING
    replicas: dict[str, list[str]]  # of each arm, as they were at its start
    groups: list[list[str]] = Field(default_factory=list)  # of depths: replicas that have the same one at a time
    result: dict[str, Any] = Field(default_factory=dict)  # what was known at its end

    @model_validator(mode="after")
    def _has_arms(self) -> Self:
        if len(self.replicas) < 2 or not all(self.replicas.values()):
            raise ValueError("a comparison has two arms with a replica each")
        return self

    def plan(self) -> Plan:
        """Return the plan of it."""
        groups = tuple(frozenset(names) for names in self.groups or self.replicas.values())
        return Plan(
            self.id,
            tuple(self.replicas),
            groups,
            rotates=bool(self.depths),
            block_s=self.block_s,
            explore=self.explore,
            usual=self.usual,
        )


def arms_of(question: Question, backends: Sequence[Backend]) -> dict[str, list[str]]:
    """Return the names of the replicas of each arm.

    Raises
    ------
    WrongArmsError
        If an arm has no replica, or one that the other has too.
    """
    if question.depths:
        return _depths(question, backends)
    arms = {text: _members(text, backends) for text in (question.a, question.b)}
    if len(arms) < 2:
        raise WrongArmsError("a and b are the same; name different replicas, or different methods")
    shared = set(arms[question.a]) & set(arms[question.b])
    if shared:
        raise WrongArmsError(f"{', '.join(sorted(shared))} would be in both arms; each replica can be in one")
    return arms


def _depths(question: Question, backends: Sequence[Backend]) -> dict[str, list[str]]:
    able = [each for each in backends if each.draft_depth]
    if question.a or question.b:
        raise WrongArmsError("name either two arms or depths")
    if len(set(question.depths)) < 2:
        raise WrongArmsError("name two depths at least, such as 0,3")
    if not able:
        raise WrongArmsError("no replica has draft_depth: true; docs/configuration.md says how to come by it")
    most = max(each.num_speculative_tokens for each in able)
    if max(question.depths) > most:
        raise WrongArmsError(f"these replicas draft {most} tokens at most, as they were started")
    return {f"k = {depth}": [each.name for each in able] for depth in dict.fromkeys(question.depths)}


def groups_of(question: Question, arms: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the replicas that have the same depth at a time: as many groups as can have another one each."""
    if not question.depths:
        return []
    names = next(iter(arms.values()))
    count = min(len(arms), len(names))
    return [names[group::count] for group in range(count)]


def _members(text: str, backends: Sequence[Backend]) -> list[str]:
    found: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        members = [each.name for each in backends if word in {each.name, each.method.value}]
        if not members:
            known = dict.fromkeys([*(each.name for each in backends), *(each.method.value for each in backends)])
            hint = did_you_mean(word, known) or f"there are {', '.join(known)}"
            raise WrongArmsError(f"no replica has the name or the method {word[:100]!r}; {hint}")
        found += [name for name in members if name not in found]
    if not found:
        raise WrongArmsError("an arm has no replica; name some, or a method")
    return found
