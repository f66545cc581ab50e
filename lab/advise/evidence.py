"""Evidence for advice from a trace: `learned` watches the recorded decisions and their outcomes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from scipy.optimize import brentq

from backends.backend import Backend
from backends.occupancy import PROBES, Minute
from gateway.advice.evidence import BackendEvidence, ModelEvidence, Positions
from gateway.advice.gather import add_learned
from gateway.advice.relative_time import Floats
from gateway.advice.settings import calibration_of, evidence_of
from gateway.config.settings import ModelSettings
from lab.trace import TraceRecord
from lab.trace.features import features_of
from policies.learned.policy import Learned, LearnedSettings
from policies.learned.shadow_drafting import ShadowSettings
from policies.policy import Decision, GuardrailSettings, Outcome

_FIT_EVERY = 100
_OK = 200
_MINUTE_S = 60.0


def evidence_from(
    records: Iterable[TraceRecord], name: str, settings: ModelSettings, calibration: str | None
) -> tuple[ModelEvidence, int]:
    """Return the evidence of a trace, and how many of its records were of use."""
    model = evidence_of(name, settings)
    chosen = calibration or next(filter(None, (calibration_of(settings, each) for each in settings.backends)), None)
    known = {} if chosen is None else {"calibration": chosen}
    policy = Learned(
        LearnedSettings(guardrail=GuardrailSettings(share=0), shadow_drafting=ShadowSettings(sample=0), **known)
    )
    candidates = {
        one.name: Backend(one.name, name, one.method, "", one.k, one.speculative_config) for one in model.backends
    }
    watched = _Watched(policy, candidates)
    for record in records:
        watched.arrive(record)
    used = watched.finish()
    backends = tuple(
        replace(one, positions=watched.positions(one), minutes=watched.minutes(one)) for one in model.backends
    )
    calibrations = (lambda _: calibration) if calibration else partial(calibration_of, settings)
    return add_learned(replace(model, backends=backends), policy, list(candidates.values()), calibrations), used


class _Watched:
    """A `learned` that observes recorded requests in order of time."""

    def __init__(self, policy: Learned, candidates: Mapping[str, Backend]) -> None:
        self._policy = policy
        self._candidates = candidates
        self._now_s = 0.0
        policy.set_clock(lambda: self._now_s)
        self._ending: list[tuple[float, int, Outcome]] = []
        self._drafts: dict[str, tuple[int, int]] = {}
        self._spans: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
        self._used = 0

    def arrive(self, record: TraceRecord) -> None:
        """Add a record, after the end of all that ended before its arrival."""
        candidate = self._candidates.get(record.backend)
        arrived_s, ended_s = record.arrived_at, record.ended_at
        if candidate is None or arrived_s is None or ended_s is None or record.status not in (None, _OK):
            return
        if record.error or record.rescued_from or not record.output_tokens:
            return
        self._end(arrived_s)
        self._now_s = arrived_s
        features = features_of(record)
        decision = self._policy.follow(Decision(candidate.name, "trace", "recorded"), features, [candidate])
        candidate.in_flight += 1
        spec = record.spec
        outcome = Outcome(
            features,
            decision,
            candidate.method,
            _OK,
            record.ttft_s,
            record.tpot_s,
            ended_s - arrived_s,
            record.prompt_tokens,
            record.output_tokens,
            None if spec is None else spec.tokens_per_step,
            None if spec is None else spec.drafted_tokens,
            None if spec is None else spec.accepted_tokens,
            record.cached_tokens,
            is_estimated=bool(record.estimated),
        )
        heapq.heappush(self._ending, (ended_s, self._used, outcome))
        self._spans[candidate.name].append((arrived_s, ended_s))
        if spec is not None and spec.drafting_steps and spec.accepted_tokens is not None:
            drafts, accepted = self._drafts.get(candidate.name, (0, 0))
            self._drafts[candidate.name] = drafts + spec.drafting_steps, accepted + spec.accepted_tokens
        self._used += 1
        if self._used % _FIT_EVERY == 0 and (work := self._policy.maintenance()) is not None:
            work()

    def finish(self) -> int:
        """Observe the end of all requests, and return their number."""
        self._end(float("inf"))
        return self._used

    def positions(self, backend: BackendEvidence) -> Positions | None:
        """Return the acceptance by position that has the recorded totals, the same at each position that is reached."""
        drafts, accepted = self._drafts.get(backend.name, (0, 0))
        if not drafts or not backend.k or not 0 < accepted < drafts * backend.k:
            return None
        mean = accepted / drafts
        rate = brentq(lambda p: sum(p ** (i + 1) for i in range(backend.k)) - mean, 0.0, 1.0)
        return Positions(drafts, tuple(drafts * rate ** (i + 1) for i in range(backend.k)), is_estimated=True)

    def minutes(self, backend: BackendEvidence) -> tuple[Minute, ...]:
        """Return how many requests the backend had in each minute, as probes would have seen it."""
        spans = np.array(self._spans[backend.name]).reshape(-1, 2)
        if not len(spans):
            return ()
        at_s = np.arange(spans.min(), spans.max() + _MINUTE_S, _MINUTE_S)
        come, gone = (_seconds_since(np.sort(times), at_s) for times in spans.T)
        return tuple(Minute(round(PROBES * each)) for each in np.diff(come - gone) / _MINUTE_S)

    def _end(self, until_s: float) -> None:
        while self._ending and self._ending[0][0] <= until_s:
            ended_s, _, outcome = heapq.heappop(self._ending)
            self._now_s = ended_s
            self._candidates[outcome.decision.backend].in_flight -= 1
            self._policy.observe(outcome)


def _seconds_since(times_s: Floats, at_s: Floats) -> Floats:
    """Return the sum over earlier times of the seconds since each, for every entry of `at_s`; both ascending."""
    earlier = np.searchsorted(times_s, at_s)
    return np.asarray(earlier * at_s - np.concatenate([[0.0], np.cumsum(times_s)])[earlier])
