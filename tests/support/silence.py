"""Answers that show a drafter to be silent."""

from __future__ import annotations

from typing import Any

from policies.learned.detector import KNOWN, Detector

KIND = "ngram:5", "", "0/0"


def silence(detector: Detector[Any], backend: str) -> None:
    """Let a backend answer with one token per step where two are expected, as other backends give for this kind."""
    for _ in range(int(KNOWN)):
        detector.observe_drafts("another", KIND, 2.0, 2.0, None, (0, 0), None, 0.0)
    answers = 0
    while backend not in detector.silent:
        detector.observe_drafts(backend, KIND, 2.0, 1.0, None, (0, 0), None, 0.0)
        answers += 1
        assert answers < 8, "it is not found"
