"""The fallback for policies that raise: requests go to the least loaded backend, with a log entry and a metric.

Policies may be third-party code, and a defect in one must not fail requests.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from backends.backend import Candidate
from backends.background import Seldom
from gateway.telemetry.registry import Registry
from policies.balancing.least_loaded import LeastLoaded
from policies.features.request import RequestFeatures
from policies.load_policy import LoadSettings
from policies.policy import Decision

log = logging.getLogger(__name__)

CALLS = (
    "choose",
    "observe",
    "observe_shadow",
    "maintenance",
    "forget",
    "engine_changed",
    "sent_elsewhere",
    "evicted",
    "price",
    "correct",
    "take_over",
)
REASON = "policy_failed"


class Fallback:
    """Chooses backends for a model when its policy fails, and counts the failures.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from backends.speculation import Method
    >>> pool = [Backend(name, "llama", Method.NGRAM, url="", in_flight=n) for name, n in (("a", 3), ("b", 1))]
    >>> from policies.features.request import Endpoint
    >>> decision = Fallback().choose(RequestFeatures("llama", Endpoint.CHAT), pool)
    >>> decision.backend, decision.policy, decision.reason
    ('b', 'least_loaded', 'policy_failed')
    """

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded(LoadSettings())
        self._failed: Counter[str] = Counter()  # since the last call of `count`
        self._logged = Seldom()

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the least loaded candidate."""
        return replace(self._least_loaded.choose(request, candidates), reason=REASON)

    def note(self, policy: str, call: str, error: Exception) -> None:
        """Count an error of a policy, and log it with its traceback, at most once a minute per method."""
        self._failed[call] += 1
        if self._logged.may_say(call):
            consequence = "; requests are routed by least_loaded" if call == "choose" else ""
            log.error(
                "policy %s failed in %s%s (logged once a minute; gateway_policy_errors_total counts failures)",
                policy,
                call,
                consequence,
                exc_info=error,
            )

    def count(self, registry: Registry, model: str) -> None:
        """Add the failures since the last call to the series."""
        errors = registry.counter("gateway_policy_errors")
        for call in CALLS:
            errors.labels(model, call).inc(self._failed.pop(call, 0))
