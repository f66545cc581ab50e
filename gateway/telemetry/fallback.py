"""What is done when a policy fails: requests go by load, and the log and a metric tell.

A policy may be anybody's code. A defect in it is no reason to turn requests away: the pool serves as well as any.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from backends.backend import Candidate
from gateway.telemetry.metrics import Metrics
from policies.features.request import RequestFeatures
from policies.load_balancing import LeastLoaded, LoadSettings
from policies.policy import Decision

log = logging.getLogger(__name__)

CALLS = ("choose", "observe", "observe_shadow", "maintenance")
REASON = "policy_failed"

_COMPLAIN_S = 60.0


class Fallback:
    """Stands in for one model's policy where that fails."""

    def __init__(self) -> None:
        self._fewest = LeastLoaded(LoadSettings())
        self._failed: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._complained_s: dict[str, float] = {}

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the least loaded candidate."""
        return replace(self._fewest.choose(request, candidates), reason=REASON)

    def note(self, policy: str, call: str, error: Exception) -> None:
        """Count an error of a policy, and tell of it with its traceback, at most once a minute for each call."""
        self._failed[call] += 1
        now_s = time.monotonic()
        if now_s - self._complained_s.get(call, -_COMPLAIN_S) >= _COMPLAIN_S:
            self._complained_s[call] = now_s
            instead = "; requests go by least_loaded" if call == "choose" else ""
            log.error(
                "policy %s failed in %s%s (said once a minute; gateway_policy_errors_total counts them)",
                policy,
                call,
                instead,
                exc_info=error,
            )

    def count(self, metrics: Metrics, model: str) -> None:
        """Add what happened since the last call to the metrics."""
        for call in CALLS:
            metrics.policy_errors.labels(model, call).inc(self._failed[call] - self._counted[call])
        self._counted = self._failed.copy()
