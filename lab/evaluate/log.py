"""Logged decisions as arrays: requests, choices and propensities, and the choices that other policies would make."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from backends.backend import EngineLoad
from backends.draft_schedule import DraftSchedule
from backends.speculation import Method
from lab.trace import TraceCandidate, TraceRecord
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Policy
from policies.roles import Scoring

Floats = npt.NDArray[np.float64]

METRICS = ("e2e_s", "ttft_s", "tpot_s")
NUMBERS = (
    "prompt_tokens", "max_tokens", "temperature", "top_p", "overlap", "code_share", "turns", "n", "structured", "tools",
    "stream", "qps", "in_flight",
)  # fmt: skip
"""Numeric features of a request known before it is sent; the columns of `Log.numbers`."""

USUAL_K = {Method.BASELINE: 0, Method.SUFFIX: 24}
"""Default of the maximum number of draft tokens per step; 5 for other methods."""

FAILED, RETRIED, RESCUED = "failed", "were retried after a failure", "were completed by another backend"
"""Two of the reasons in `Log.left_out`."""

_IDLE = EngineLoad()
_VALUES = attrgetter(*METRICS, *NUMBERS)
_AS_RECORDED = (
    "temperature", "top_p", "overlap", "code_share", "turns", "structured", "tools", "stream", "qps", "in_flight",
)  # fmt: skip
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_OK = 200
_MAX_DRAWS = 100
_SURE = 1e-9


@dataclass(frozen=True, slots=True)
class LoggedCandidate:
    """The state of a backend when a logged request arrived (a `backends.backend.Candidate`).

    Examples
    --------
    >>> LoggedCandidate("a", Method.EAGLE3, DraftSchedule(3), in_flight=2).num_speculative_tokens
    3
    """

    name: str
    method: Method
    draft_schedule: DraftSchedule = field(default_factory=partial(DraftSchedule, 0))
    weight: float = 1.0
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum tokens drafted per step; 0 for a baseline."""
        return self.draft_schedule.k


@dataclass(slots=True)
class Log:
    """Logged requests as arrays, in order of arrival.

    Attributes
    ----------
    backends
        Names of all candidates.
    chosen
        Index in `backends` of the chosen backend, shape (requests,).
    propensity
        Probability of that choice, shape (requests,).
    numbers, names
        Features known before a request is sent: numbers of shape (requests, len(NUMBERS)), NaN if unknown, and int32
        codes of template and workload of shape (requests, 2).
    in_flight, predicted_s
        Load and predicted time of each backend at arrival, shape (requests, backends); NaN if unknown or no candidate.
    outcomes
        By metric: outcomes of shape (requests,), NaN if missing.
    propensities
        By policy: probability of choosing each backend, shape (requests, backends).
    impossible
        By policy: probability of a choice that the log's policy would never make, shape (requests,).
    missing_features
        By policy: text features that it depends on and that no record has.
    left_out
        Number of unusable records by reason.
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
    missing_features: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, int]

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.chosen)


def read_log(
    records: Iterable[TraceRecord],
    policies: Mapping[str, Policy],
    pool: Mapping[str, LoggedCandidate] | None = None,
) -> Log:
    """Read a log, and compute what each policy would choose for each of its requests.

    Parameters
    ----------
    records
        Records of one model in any order; stateful policies such as `round_robin` see them in this order.
    policies
        Policies by name. They observe no outcomes, so their learned state does not change.
    pool
        Method, k and weight of backends by name. A backend that is missing here has the method from the log, weight 1
        and the k of `USUAL_K`.

    Raises
    ------
    ValueError
        If no record has a choice with its outcome.
    """
    reader = _Reader(policies, dict(pool or {}))
    for record in records:
        reader.read(record)
    return reader.log()


def features_of(record: TraceRecord) -> RequestFeatures:
    """Return the features of a logged request as a policy saw them, with defaults for missing ones.

    Examples
    --------
    >>> features_of(TraceRecord(prompt_tokens=12, overlap=0.5)).overlap
    0.5
    """
    known = {name: value for name in _AS_RECORDED if (value := getattr(record, name)) is not None}
    return RequestFeatures(
        model=record.model,
        endpoint=_ENDPOINTS.get(record.endpoint, Endpoint.CHAT),
        n=record.n,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        template=record.template,
        workload=record.workload,
        baseline_only=tuple(record.baseline_only),
        **known,
    )


def propensities(policy: Policy, request: RequestFeatures, candidates: Sequence[LoggedCandidate]) -> list[float]:
    """Return the probability with which a policy chooses each candidate.

    A policy that explains its candidates is asked once. Any other is asked repeatedly, since each decision gives the
    exact probability of one candidate, until the probabilities add up to one. After a hundred decisions, the remainder
    is divided evenly among the candidates never chosen.
    """
    index = {candidate.name: number for number, candidate in enumerate(candidates)}
    probabilities = [0.0] * len(candidates)
    was_chosen = [False] * len(candidates)
    for _ in range(_MAX_DRAWS):
        decision = policy.choose(request, candidates)
        if (considered := decision.considered) is not None:
            for candidate, propensity in zip(considered.candidates, considered.propensities, strict=True):
                probabilities[index[candidate.name]] = propensity
            return probabilities
        chosen = index[decision.backend]
        probabilities[chosen], was_chosen[chosen] = decision.propensity, True
        remainder = 1.0 - sum(probabilities)
        if remainder < _SURE:
            return probabilities
    never_chosen = [number for number, chosen_once in enumerate(was_chosen) if not chosen_once]
    for number in never_chosen or range(len(probabilities)):
        probabilities[number] += remainder / len(never_chosen or probabilities)
    return probabilities


class _Reader:
    def __init__(self, policies: Mapping[str, Policy], pool: dict[str, LoggedCandidate]) -> None:
        self._policies = policies
        for policy in policies.values():
            if isinstance(policy, Scoring):
                policy.explain_candidates = True
        self._pool = pool
        self._indices: dict[str, int] = {}
        self._codes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._chosen = array("i")
        self._arrived_at = array("d")
        self._rows = array("d")
        self._names = array("i")
        self._matrices = _SparseMatrices(["in_flight", "predicted_s", *(_propensities_of(name) for name in policies)])
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
        backends = [self._indices.setdefault(one.backend, len(self._indices)) for one in record.candidates]
        self._chosen.append(self._indices[record.backend])
        self._rows.append(record.propensity)
        self._rows.extend(map(_known, _VALUES(record)))
        for codes, name in zip(self._codes, (record.template, record.workload), strict=True):
            self._names.append(codes.setdefault(name, len(codes)))
        matrices = self._matrices
        matrices.append_indices(number, backends)
        matrices.append_values("in_flight", [_known(one.in_flight) for one in record.candidates])
        matrices.append_values("predicted_s", [_known(one.prediction_s) for one in record.candidates])
        request = features_of(record)
        candidates = [self._candidate(one) for one in record.candidates]
        possible = [_is_possible(one, record) for one in record.candidates]
        for name, policy in self._policies.items():
            shares = propensities(policy, request, candidates)
            matrices.append_values(_propensities_of(name), shares)
            impossible = [share for share, is_possible in zip(shares, possible, strict=True) if not is_possible]
            self._impossible[name].append(sum(impossible, 0.0))

    def log(self) -> Log:
        if not self._chosen:
            reasons = "; ".join(f"{count} {why}" for why, count in self._left_out.items()) or "it is empty"
            raise ValueError(f"no record of the log has a choice with its propensity and outcome: {reasons}")
        order = np.argsort(np.array(self._arrived_at), kind="stable")
        rows = np.array(self._rows).reshape(len(self._chosen), -1)[order]
        shape = (len(rows), len(self._indices))
        matrices = self._matrices
        return Log(
            backends=tuple(self._indices),
            chosen=np.array(self._chosen, np.int32)[order],
            propensity=rows[:, 0],
            numbers=rows[:, 1 + len(METRICS) :],
            names=np.array(self._names, np.int32).reshape(len(rows), -1)[order],
            in_flight=matrices.dense("in_flight", shape, np.nan)[order],
            predicted_s=matrices.dense("predicted_s", shape, np.nan)[order],
            outcomes={metric: rows[:, 1 + index] for index, metric in enumerate(METRICS)},
            propensities={name: matrices.dense(_propensities_of(name), shape, 0.0)[order] for name in self._policies},
            impossible={name: np.array(shares)[order] for name, shares in self._impossible.items()},
            missing_features={name: self._missing_features(policy, rows) for name, policy in self._policies.items()},
            left_out=self._left_out,
        )

    def _missing_features(self, policy: Policy, rows: Floats) -> tuple[str, ...]:
        known = {name for index, name in enumerate(NUMBERS, 1 + len(METRICS)) if not np.isnan(rows[:, index]).all()}
        known |= {"template"} if any(self._codes[0]) else set()
        return tuple(sorted(policy.text_features - known))

    def _candidate(self, one: TraceCandidate) -> LoggedCandidate:
        known = self._pool.get(one.backend)
        if known is None:
            method = Method(one.method) if one.method in set(Method) else Method.CUSTOM_CLASS
            known = self._pool[one.backend] = LoggedCandidate(
                one.backend, method, DraftSchedule(USUAL_K.get(method, 5))
            )
        return LoggedCandidate(
            known.name,
            known.method,
            known.draft_schedule,
            known.weight,
            one.in_flight or 0,
            EngineLoad(one.running, one.waiting or 0) if one.running is not None else _IDLE,
        )


class _SparseMatrices:
    """Matrices by request and backend that share their indices; compact enough for a million requests."""

    def __init__(self, names: Sequence[str]) -> None:
        self._requests, self._backends = array("i"), array("i")
        self._values = {name: array("d") for name in names}

    def append_indices(self, request: int, backends: Sequence[int]) -> None:
        """Append the indices of the next values: one request, and its candidates."""
        self._requests.extend([request] * len(backends))
        self._backends.extend(backends)

    def append_values(self, name: str, values: Sequence[float]) -> None:
        """Append values of one matrix, one for each of those candidates."""
        self._values[name].extend(values)

    def dense(self, name: str, shape: tuple[int, int], empty: float) -> Floats:
        """Return one matrix, with `empty` where there is no value."""
        matrix = np.full(shape, empty)
        matrix[np.frombuffer(self._requests, np.int32), np.frombuffer(self._backends, np.int32)] = np.frombuffer(
            self._values[name]
        )
        return matrix


def _propensities_of(policy: str) -> str:
    return f"propensities of {policy}"


def _why_left_out(record: TraceRecord) -> str:
    if not record.backend or not record.candidates or record.backend not in {one.backend for one in record.candidates}:
        return "have no choice among candidates"
    if record.propensity is None or not 0 < record.propensity <= 1 + _SURE:
        return "have no propensity"
    if record.error or (record.status is not None and record.status != _OK):
        return FAILED
    if record.retried_from:
        return RETRIED
    if record.rescued_from:
        return RESCUED
    if record.endpoint == Endpoint.OTHER:
        return "are not inference"
    if record.e2e_s is None or record.e2e_s <= 0:
        return "have no end time"
    return ""


def _is_possible(candidate: TraceCandidate, record: TraceRecord) -> bool:
    """Return whether the log's policy could have chosen a candidate, as far as the record says."""
    if candidate.backend == record.backend:
        return True
    if candidate.propensity is not None:
        return candidate.propensity > 0
    assert record.propensity is not None
    return record.propensity < 1 - _SURE


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
