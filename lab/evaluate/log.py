"""What a log tells of choices: the situations, what was chosen and how probably, and what a policy would choose."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from backends.backend import EngineLoad
from backends.speculation import Method
from lab.trace import TraceCandidate, TraceRecord
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Policy

Floats = npt.NDArray[np.float64]

METRICS = ("e2e_s", "ttft_s", "tpot_s")
NUMBERS = (
    "prompt_tokens", "max_tokens", "temperature", "top_p", "overlap", "code_share", "turns", "n", "structured", "tools",
    "stream", "qps", "in_flight",
)  # fmt: skip
"""What is known of a request as a number before it is sent; the columns of `Log.numbers`."""

USUAL_K = {Method.BASELINE: 0, Method.SUFFIX: 24}
"""Tokens drafted a step at most where nobody says; 5 with any other method."""

_IDLE = EngineLoad()
_VALUES = attrgetter(*METRICS, *NUMBERS)
_AS_RECORDED = (
    "temperature", "top_p", "overlap", "code_share", "turns", "structured", "tools", "stream", "qps", "in_flight",
)  # fmt: skip
_OK = 200
_MOST_DRAWS = 100
_SURE = 1e-9


@dataclass(frozen=True, slots=True)
class LoggedCandidate:
    """A backend as it was when a logged request came (a `backends.backend.Candidate`)."""

    name: str
    method: Method
    num_speculative_tokens: int = 0
    weight: float = 1.0
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(slots=True)
class Log:
    """Logged requests as arrays, in order of arrival: `requests` of them, and the `backends` they could have gone to.

    Attributes
    ----------
    chosen
        Place in `backends` of what each request was sent to, shape (requests,).
    propensity
        Probability of that choice when it was made, shape (requests,).
    numbers, names
        What is known of each request before it is sent: shape (requests, len(NUMBERS)), NaN where it is not known, and
        int32 codes of its template and workload, shape (requests, 2).
    in_flight, predicted_s
        Of each backend when the request came, shape (requests, backends); NaN where it was no candidate or not known.
    outcomes
        By metric, shape (requests,), NaN where it has none.
    chances
        By policy: the probability with which it would choose each backend, shape (requests, backends).
    impossible
        By policy: the probability with which it would choose what the log's policy never would have, shape (requests,).
    untold
        By policy: the features of texts that it decides by and that no record tells.
    left_out
        Records that tell nothing of this, by the reason.
    """

    backends: tuple[str, ...]
    chosen: npt.NDArray[np.int32]
    propensity: Floats
    numbers: Floats
    names: npt.NDArray[np.int32]
    in_flight: Floats
    predicted_s: Floats
    outcomes: Mapping[str, Floats]
    propensities: Mapping[str, Floats]
    impossible: Mapping[str, Floats]
    untold: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, int]

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.chosen)


def read_log(
    records: Iterable[TraceRecord],
    policies: Mapping[str, Policy],
    pool: Mapping[str, LoggedCandidate] | None = None,
) -> Log:
    """Ask each policy what it would have done with each request of a log.

    Parameters
    ----------
    records
        Of one model, in any order; those that policies count turns by are asked in this one.
    policies
        By name. They are asked and told nothing of what came of it: what they have learned stays as it is.
    pool
        What is known of backends beside the log: method, k, weight. A backend that is not in it has the method that the
        log says, a weight of 1, and as many drafted tokens as is usual (`USUAL_K`).

    Raises
    ------
    ValueError
        If no record tells of a choice.
    """
    reader = _Reader(policies, dict(pool or {}))
    for record in records:
        reader.read(record)
    return reader.log()


def features_of(record: TraceRecord) -> RequestFeatures:
    """Return a logged request as a policy saw it; what the record does not tell is as `RequestFeatures` has it."""
    known = {name: value for name in _AS_RECORDED if (value := getattr(record, name)) is not None}
    return RequestFeatures(
        model=record.model,
        endpoint=Endpoint(record.endpoint) if record.endpoint in set(Endpoint) else Endpoint.CHAT,
        n=record.n,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        template=record.template,
        workload=record.workload,
        baseline_only=tuple(record.baseline_only),
        **known,
    )


def propensities(policy: Policy, request: RequestFeatures, candidates: Sequence[LoggedCandidate]) -> list[float]:
    """Return the probability with which a policy would choose each candidate.

    A policy that tells of all candidates is asked once. Of another each draw tells one probability exactly, so it is
    asked until they add up to one; what is left after a hundred draws goes to those never drawn, evenly.
    """
    place = {candidate.name: number for number, candidate in enumerate(candidates)}
    found = [0.0] * len(candidates)
    seen = [False] * len(candidates)
    for _ in range(_MOST_DRAWS):
        decision = policy.choose(request, candidates)
        if (considered := decision.considered) is not None:
            for candidate, propensity in zip(considered.candidates, considered.propensities, strict=True):
                found[place[candidate.name]] = propensity
            return found
        number = place[decision.backend]
        found[number], seen[number] = decision.propensity, True
        left = 1.0 - sum(found)
        if left < _SURE:
            return found
    others = [number for number, was_seen in enumerate(seen) if not was_seen]
    for number in others or range(len(found)):
        found[number] += left / len(others or found)
    return found


class _Reader:
    def __init__(self, policies: Mapping[str, Policy], pool: dict[str, LoggedCandidate]) -> None:
        self._policies = policies
        for policy in policies.values():
            policy.explain_candidates = True
        self._pool = pool
        self._places: dict[str, int] = {}
        self._codes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._chosen = array("i")
        self._arrived_at = array("d")
        self._rows = array("d")
        self._names = array("i")
        self._cells = _Cells(["in_flight", "predicted_s", *(_propensities_of(name) for name in policies)])
        self._impossible = {name: array("d") for name in policies}
        self._left_out: dict[str, int] = {}

    def read(self, record: TraceRecord) -> None:
        why = _why_left_out(record)
        if why:
            self._left_out[why] = self._left_out.get(why, 0) + 1
            return
        assert record.propensity is not None
        number = len(self._chosen)
        self._arrived_at.append(0.0 if record.arrived_at is None else record.arrived_at)
        places = [self._places.setdefault(one.backend, len(self._places)) for one in record.candidates]
        self._chosen.append(self._places[record.backend])
        self._rows.append(record.propensity)
        self._rows.extend(map(_known, _VALUES(record)))
        for codes, name in zip(self._codes, (record.template, record.workload), strict=True):
            self._names.append(codes.setdefault(name, len(codes)))
        cells = self._cells
        cells.at(number, places)
        cells.put("in_flight", [_known(one.in_flight) for one in record.candidates])
        cells.put("predicted_s", [_known(one.prediction_s) for one in record.candidates])
        request = features_of(record)
        candidates = [self._candidate(one) for one in record.candidates]
        possible = [_is_possible(one, record) for one in record.candidates]
        for name, policy in self._policies.items():
            shares = propensities(policy, request, candidates)
            cells.put(_propensities_of(name), shares)
            cannot_be = [share for share, can_be in zip(shares, possible, strict=True) if not can_be]
            self._impossible[name].append(sum(cannot_be) if cannot_be else 0.0)

    def log(self) -> Log:
        if not self._chosen:
            told = "; ".join(f"{count} {why}" for why, count in self._left_out.items()) or "it is empty"
            raise ValueError(f"no record of the log tells of a choice and what came of it: {told}")
        order = np.argsort(np.array(self._arrived_at), kind="stable")
        rows = np.array(self._rows).reshape(len(self._chosen), -1)[order]
        shape = (len(rows), len(self._places))
        cells = self._cells
        return Log(
            backends=tuple(self._places),
            chosen=np.array(self._chosen, np.int32)[order],
            propensity=rows[:, 0],
            numbers=rows[:, 1 + len(METRICS) :],
            names=np.array(self._names, np.int32).reshape(len(rows), -1)[order],
            in_flight=cells.table("in_flight", shape, np.nan)[order],
            predicted_s=cells.table("predicted_s", shape, np.nan)[order],
            outcomes={metric: rows[:, 1 + place] for place, metric in enumerate(METRICS)},
            propensities={name: cells.table(_propensities_of(name), shape, 0.0)[order] for name in self._policies},
            impossible={name: np.array(shares)[order] for name, shares in self._impossible.items()},
            untold={name: self._untold(policy, rows) for name, policy in self._policies.items()},
            left_out=self._left_out,
        )

    def _untold(self, policy: Policy, rows: Floats) -> tuple[str, ...]:
        told = {name for place, name in enumerate(NUMBERS, 1 + len(METRICS)) if not np.isnan(rows[:, place]).all()}
        told |= {"template"} if any(self._codes[0]) else set()
        return tuple(sorted(policy.text_features - told))

    def _candidate(self, one: TraceCandidate) -> LoggedCandidate:
        known = self._pool.get(one.backend)
        if known is None:
            method = Method(one.method) if one.method in set(Method) else Method.CUSTOM_CLASS
            known = self._pool[one.backend] = LoggedCandidate(one.backend, method, USUAL_K.get(method, 5))
        return LoggedCandidate(
            known.name,
            known.method,
            known.num_speculative_tokens,
            known.weight,
            one.in_flight or 0,
            EngineLoad(one.running, one.waiting or 0) if one.running is not None else _IDLE,
        )


class _Cells:
    """Numbers by request and backend, as they come; small enough for a million requests."""

    def __init__(self, names: Sequence[str]) -> None:
        self._requests, self._backends = array("i"), array("i")
        self._values = {name: array("d") for name in names}

    def at(self, request: int, backends: Sequence[int]) -> None:
        """Say of which request and backends the next numbers are."""
        self._requests.extend([request] * len(backends))
        self._backends.extend(backends)

    def put(self, name: str, values: Sequence[float]) -> None:
        """Add the numbers of one kind, one for each of those backends."""
        self._values[name].extend(values)

    def table(self, name: str, shape: tuple[int, int], empty: float) -> Floats:
        """Return the numbers of one kind as a table, `empty` where there is none."""
        table = np.full(shape, empty)
        table[np.frombuffer(self._requests, np.int32), np.frombuffer(self._backends, np.int32)] = np.frombuffer(
            self._values[name]
        )
        return table


def _propensities_of(policy: str) -> str:
    return f"chances of {policy}"


def _why_left_out(record: TraceRecord) -> str:
    if not record.backend or not record.candidates or record.backend not in {one.backend for one in record.candidates}:
        return "tell of no choice among candidates"
    if record.propensity is None or not 0 < record.propensity <= 1 + _SURE:
        return "tell of no propensity"
    if record.error or (record.status is not None and record.status != _OK):
        return "failed"
    if record.retried_from:
        return "were sent again after a failure"
    if record.e2e_s is None or record.e2e_s <= 0:
        return "have no time of their end"
    return ""


def _is_possible(one: TraceCandidate, record: TraceRecord) -> bool:
    """Whether the log's policy could have chosen this candidate, as far as the record tells."""
    if one.backend == record.backend:
        return True
    if one.propensity is not None:
        return one.propensity > 0
    assert record.propensity is not None
    return record.propensity < 1 - _SURE


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
