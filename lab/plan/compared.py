"""Findings of comparisons on live traffic, next to what a plan simulates for the same methods."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from backends.files.regular import read_file
from backends.speculation import Method
from backends.validation import UsageError
from lab.plan.mixes import title
from lab.plan.result import JudgedMix, Plan
from policies.experiment.verdict import CERTAIN

_MOST_BYTES = 16 << 20
_METHODS = frozenset(Method)


class _Point(BaseModel):
    ratio: float
    low: float
    high: float
    in_flight: float  # requests per replica


class _Finding(BaseModel):
    better: str
    other: str
    at_mean: _Point


class _Arm(BaseModel):
    replicas: list[str]


class _Comparison(BaseModel):
    stage: str
    began_s: float
    arms: dict[str, _Arm]
    findings: list[_Finding]


class _Status(BaseModel):
    models: dict[str, _Comparison]


@dataclass(frozen=True, slots=True)
class LiveFinding:
    """How two methods compared on live traffic: the ratio of their mean times, with its interval."""

    better: Method
    other: Method
    at: _Point
    day: str

    def beside(self, plan: Plan) -> str:
        """Return it in words, with what the plan simulates."""
        at = self.at
        found = (
            f"{self.day} requests took {_less(at.ratio)} with {self.better} than with {self.other} at "
            f"{at.in_flight:.1f} in flight per replica ({CERTAIN:.0%}: {_less(at.high)} to {_less(at.low)})"
        )
        mine, theirs = (_alike(plan, method) for method in (self.better, self.other))
        if mine is None or theirs is None:
            return f"On {found}; here not both are among the best mixes, all replicas alike."
        simulated = mine.e2e_s / theirs.e2e_s
        start = "Not to be relied on, as live traffic contradicts it: on" if simulated > 1.0 > at.high else "On"
        return (
            f"{start} {found}; simulated, "
            f"{title(mine.mix, plan.kinds)} takes {_less(simulated)} than {title(theirs.mix, plan.kinds)}."
        )


def read_findings(path: Path | None, model: str | None, methods: Mapping[str, Method]) -> Sequence[LiveFinding]:
    """Return the findings on a model's methods from a file of `gateway compare status --json`.

    Parameters
    ----------
    model
        Name of the model; None: the only one.
    methods
        Method of each replica of the pool, to resolve arms that name replicas.

    Raises
    ------
    UsageError
        If the file cannot be read as such, or has nothing on two methods of the model.
    """
    if path is None:
        return []
    try:
        known = _Status.model_validate_json(read_file(path, _MOST_BYTES)).models
    except OSError as error:
        raise UsageError(f"--compared {path}: {error.strerror or error}") from None
    except ValidationError:
        raise UsageError(f"--compared {path} is not what `gateway compare status --json` prints") from None
    named = [*known] if model is None else [model]
    if len(named) != 1 or named[0] not in known:
        of = "one model" if model is None else f"model {model!r}"
        raise UsageError(f"--compared {path} needs findings of {of}; it has {', '.join(known) or 'none'}")
    if not (found := [*_findings(known[named[0]], methods)]):
        what = f"{' and '.join(known[named[0]].arms)} ({known[named[0]].stage})"
        raise UsageError(f"--compared {path}: {what} says nothing of two methods that --config or the arms name")
    return found


def _findings(comparison: _Comparison, methods: Mapping[str, Method]) -> Iterator[LiveFinding]:
    if comparison.stage not in {"decided", "alike"}:
        return
    day = time.strftime("%Y-%m-%d", time.gmtime(comparison.began_s))
    for one in comparison.findings:
        better, other = (_method(comparison, name, methods) for name in (one.better, one.other))
        if better is not None and other is not None and better is not other:
            yield LiveFinding(better, other, one.at_mean, day)


def _method(comparison: _Comparison, arm: str, methods: Mapping[str, Method]) -> Method | None:
    """Return the method of an arm; None if its replicas have several, or are unknown."""
    if arm in _METHODS:
        return Method(arm)
    members = comparison.arms[arm].replicas if arm in comparison.arms else []
    found = {methods.get(name) for name in members}
    return found.pop() if len(found) == 1 else None


def _alike(plan: Plan, method: Method) -> JudgedMix | None:
    """Return the best judged mix whose replicas all have this method."""
    as_many = [one for one in plan.judged if len(one.mix) == len(plan.chosen)]
    own = [one for one in as_many if all(plan.kinds[kind].method is method for kind in one.mix)]
    return min(own, key=lambda one: one.e2e_s, default=None)


def _less(ratio: float) -> str:
    return f"{abs(1.0 - ratio):.0%} {'less' if ratio <= 1.0 else 'more'} time"
