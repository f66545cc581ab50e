"""All rules, and their findings as documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.advice.draft_length import draft_length
from gateway.advice.engine_flags import prefix_caching, reports
from gateway.advice.evidence import ModelEvidence
from gateway.advice.finding import LEAST_GAIN, Finding
from gateway.advice.losing_method import losing_method
from gateway.advice.schedule import schedule
from gateway.advice.tokenizer import tokenizers
from gateway.advice.waiting import waiting

RULES: Final[tuple[Callable[[ModelEvidence], Sequence[Finding]], ...]] = (
    draft_length,
    schedule,
    losing_method,
    waiting,
    prefix_caching,
    tokenizers,
    reports,
)


_EITHER: Final = {"draft_length": 0.0, "schedule": LEAST_GAIN, "losing_method": 0.0}
"""Rules of which a backend gets one finding, that of the largest gain; and what the others must exceed it by."""


def advise(model: ModelEvidence) -> list[Finding]:
    """Return what to change, the largest gain first; of another k, a schedule and another method only the best."""
    findings = [finding for rule in RULES for finding in rule(model)]
    best: dict[str, tuple[float, Finding]] = {}
    for finding in findings:
        if finding.rule in _EITHER and finding.gain is not None:
            worth = finding.gain.share - _EITHER[finding.rule]
            if finding.backend not in best or worth > best[finding.backend][0]:
                best[finding.backend] = worth, finding
    kept = [finding for finding in findings if finding.rule not in _EITHER or best[finding.backend][1] is finding]
    return sorted(kept, key=lambda finding: -(finding.gain.share if finding.gain else 0.0))


def document(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON."""
    return [dataclasses.asdict(finding) for finding in findings]
