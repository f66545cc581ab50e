"""All rules, and their findings as documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.advice.draft_length import draft_length
from gateway.advice.engine_flags import prefix_caching, reports
from gateway.advice.evidence import ModelEvidence
from gateway.advice.finding import Finding
from gateway.advice.losing_method import losing_method
from gateway.advice.tokenizer import tokenizers
from gateway.advice.waiting import waiting

RULES: Final[tuple[Callable[[ModelEvidence], Sequence[Finding]], ...]] = (
    draft_length,
    losing_method,
    waiting,
    prefix_caching,
    tokenizers,
    reports,
)


def advise(model: ModelEvidence) -> list[Finding]:
    """Return what to change, the largest gain first.

    A backend whose method loses gets no advice on its k.
    """
    findings = [finding for rule in RULES for finding in rule(model)]
    losing = {finding.backend: finding.gain for finding in findings if finding.rule == "losing_method"}
    kept = [
        finding
        for finding in findings
        if not (
            finding.rule == "draft_length" and finding.backend in losing and _less(finding, losing[finding.backend])
        )
        and not (finding.rule == "losing_method" and _better_k(finding, findings))
    ]
    return sorted(kept, key=lambda finding: -(finding.gain.share if finding.gain else 0.0))


def _less(finding: Finding, gain: Any) -> bool:
    return finding.gain is not None and gain is not None and finding.gain.share < gain.share


def _better_k(losing: Finding, findings: Sequence[Finding]) -> bool:
    """Return whether another k gains at least as much as another method."""
    return any(
        other.rule == "draft_length" and other.backend == losing.backend and not _less(other, losing.gain)
        for other in findings
    )


def document(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON."""
    return [dataclasses.asdict(finding) for finding in findings]
