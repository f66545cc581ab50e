"""Rule: requests that are longer than what a drafter serves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from gateway.rooms.advice.evidence import ModelEvidence
from gateway.rooms.advice.finding import LEAST_GAIN, MIN_ANSWERS, Finding, lines

_WORTH: Final = "drafts for longer requests"


def drafter_limit(model: ModelEvidence) -> list[Finding]:
    """Return the limits that a part of the model's requests exceeds, wherever they were sent."""
    total, findings = sum(each.contexts.get(math.inf, 0.0) for each in model.backends), []
    for limit in {each.limit: None for each in model.backends if each.limit is not None}:
        limited = [each for each in model.backends if each.limit == limit]
        longer = sum(beyond(each.contexts, limit.tokens) for each in model.backends)
        here = sum(beyond(each.contexts, limit.tokens) for each in limited)
        if longer < LEAST_GAIN * total or total < MIN_ANSWERS:
            continue
        change = ["speculative_config:", "  model: ... # a draft that serves longer contexts"]
        if all(each.limit is not None for each in model.backends):
            change += ["# or a replica beside it that drafts at any length, such as", "# method: suffix"]
        title = f"{longer / total:.0%} of the model's requests exceed the drafter's {limit.tokens:,} tokens"
        evidence = f"{longer:,.0f} of {total:,.0f} requests, of which {here:,.0f} were sent here: {limit.consequence}"
        names, change_text = ", ".join(each.name for each in limited), lines(model.name, limited[0].name, *change)
        findings.append(Finding("drafter_limit", model.name, names, title, None, evidence, change_text, _WORTH))
    return findings


def beyond(contexts: Mapping[float, float], tokens: int) -> float:
    """Return how many of the contexts counted up to each bound are longer, even in log length between two bounds.

    Examples
    --------
    >>> beyond({1024: 10, 2048: 60, 8192: 80, math.inf: 100}, 2048), beyond({2048: 0, 8192: 50, math.inf: 50}, 4096)
    (40.0, 25.0)
    """
    bounds = sorted(contexts)[:-1]
    if not bounds:
        return 0.0
    upto = np.interp(math.log2(tokens), np.log2(bounds), [contexts[bound] for bound in bounds])
    return contexts[math.inf] - float(upto)
