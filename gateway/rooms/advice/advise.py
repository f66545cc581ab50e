"""All rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gateway.rooms.advice.draft_length import draft_length
from gateway.rooms.advice.drafter_limit import drafter_limit
from gateway.rooms.advice.evidence import ModelEvidence
from gateway.rooms.advice.experiment import experiment
from gateway.rooms.advice.finding import Finding
from gateway.rooms.advice.losing_method import losing_method
from gateway.rooms.advice.pool_file import pool_file
from gateway.rooms.advice.trouble import trouble
from gateway.rooms.advice.waiting import waiting

Rule = Callable[[ModelEvidence], Sequence[Finding]]
RULES: Final[tuple[Rule, ...]] = (drafter_limit, draft_length, losing_method, waiting)
SPECULATION: Final = frozenset({"draft_length", "losing_method"})
"""Rules on how replicas speculate, of which a model gets one finding."""


def advise(model: ModelEvidence) -> list[Finding]:
    """Return what to change, the largest gain first.

    How replicas speculate is changed one replica at a time, that first whose change saves the pool most: after it, the
    traffic of the others is another one. A backend that is not what the pool file says is left out of all else:
    its figures are those of something unknown.
    """
    contradicted = pool_file(model)
    model = replace(model, backends=tuple(backend for backend in model.backends if backend.contradiction is None))
    findings = [finding for rule in RULES for finding in rule(model)]
    answers = {backend.name: backend.steps.answers for backend in model.backends if backend.steps is not None}
    total = sum(answers.values())

    def worth(finding: Finding) -> float:
        """Return the share of the time of all answers that a change saves."""
        share = 0.0 if finding.gain is None else finding.gain.share
        return share * answers[finding.backend] / total

    best = max((finding for finding in findings if finding.rule in SPECULATION), key=worth, default=None)
    kept = [finding for finding in findings if finding.rule not in SPECULATION or finding is best]
    kept.sort(key=lambda finding: -(finding.gain.share if finding.gain else 0.0))
    # Where nothing is certain of how replicas speculate, finding out may be worth it.
    return [*contradicted, *trouble(model), *kept, *(experiment(model) if best is None else [])]
