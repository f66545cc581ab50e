"""Decisions of a model sampled while a dashboard is open, with their outcomes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from backends.backend import Backend
from gateway.relay.observers import EndedExchange, Observer
from gateway.routing.routed_request import RoutedRequest
from policies.build import predicted_s
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision

SHOWN = 50
_MOST_TEMPLATES = 256
_FIRST_CHARACTERS = 48
SAMPLE_S = 0.25
"""Least seconds between two samples, to bound their cost."""


class SampledDecisions:
    """The sampled decisions of a model; follows its exchanges only while a dashboard is open."""

    def __init__(self, *, explains: bool) -> None:
        self.explains = explains  # whether the policy includes scores in all decisions, not only in sampled ones
        self.templates: dict[str, str] | None = None  # first words of each; None if no text may be shown
        self._next_s = 0.0
        self._count = 0
        self._shown: deque[dict[str, Any]] = deque(maxlen=SHOWN)

    def document(self) -> list[dict[str, Any]]:
        """Return the last decisions, newest last."""
        return list(self._shown)

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        """Return an observer of the exchange if a sample is due, and have its decision explained."""
        now_s = time.monotonic()
        if now_s < self._next_s or routed.features.endpoint is Endpoint.OTHER:
            return None
        self._next_s = now_s + SAMPLE_S
        if self.templates is not None and routed.prompt is not None and len(self.templates) < _MOST_TEMPLATES:
            for text in (routed.prompt.system or routed.prompt.pieces)[:1]:
                self.templates.setdefault(routed.features.template, " ".join(text[:_FIRST_CHARACTERS].split()))
        if (explainer := routed.model.explainer) is not None:
            explainer.explain_candidates = True
        return SampledExchange(routed, self)

    def add(self, decision: dict[str, Any]) -> None:
        """Add a decision, with its number."""
        self._count += 1
        decision["number"] = self._count
        self._shown.append(decision)


class SampledExchange(Observer):
    """A sampled exchange."""

    needs_answer: ClassVar[bool] = False

    def __init__(self, routed: RoutedRequest, sampled: SampledDecisions) -> None:
        self._routed = routed
        self._sampled = sampled
        self._last: dict[str, Any] | None = None

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Add a decision before the load of its backend changes, and record how the previous attempt ended."""
        if self._last is not None:
            self._last["ended"] = {"outcome": "retried", "e2e_s": None}
        self._explain_no_more()
        self._last = {
            "at_s": time.time(),
            "request": _request(self._routed.features),
            "backend": decision.backend,
            "arm": decision.arm,
            "policy": decision.policy,
            "reason": decision.reason,
            "propensity": _short(decision.propensity),
            "predicted_s": _short(predicted_s(decision)),  # seconds to finish
            "candidates": _candidates(decision, candidates),
            "ended": None,
        }
        self._sampled.add(self._last)

    def on_end(self, ended: EndedExchange) -> None:
        """Record the outcome of the request."""
        self._explain_no_more()  # even if it was never sent
        if self._last is not None:
            e2e_s = None if ended.outcome is None else _short(ended.outcome.e2e_s)
            self._last["ended"] = {"outcome": ended.label, "e2e_s": e2e_s}

    def _explain_no_more(self) -> None:
        if (explainer := self._routed.model.explainer) is not None:
            explainer.explain_candidates = self._sampled.explains


def _request(features: RequestFeatures) -> dict[str, Any]:
    """Return the kind of a request, and nothing of its text."""
    return {
        "endpoint": features.endpoint.value,
        "stream": features.stream,
        "n": features.n,
        "temperature": features.temperature,
        "prompt_tokens": features.prompt_tokens,
        "max_tokens": features.max_tokens,
        "workload": features.workload,
        "template": features.template,
        "overlap": _short(features.overlap),
        "code_share": _short(features.code_share),
        "turns": features.turns,
        "structured": features.structured,
        "tools": features.tools,
    }


def _candidates(decision: Decision, candidates: Sequence[Backend]) -> list[dict[str, Any]]:
    """Return the candidates with their scores, if they are in the decision."""
    costs: Sequence[float | None] = decision.costs or [None] * len(decision.candidates)
    rows = zip(decision.candidates, costs, decision.predicted_s, decision.propensities, strict=True)
    scores = {one.name: (cost, predicted, propensity) for one, cost, predicted, propensity in rows}
    views = []
    for each in candidates:
        # score: what the policy minimises, in its own unit (`learned`: seconds)
        score, predicted, propensity = map(_short, scores.get(each.name, (None, None, None)))
        figures = {"score": score, "predicted_s": predicted, "propensity": propensity}
        views.append({"backend": each.name, **figures, "in_flight": each.in_flight + each.load.others})
    return views


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 5)
