"""Rule: requests that are longer than what a drafter serves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from gateway.advice.evidence import ModelEvidence
from gateway.advice.finding import LEAST_GAIN, MIN_ANSWERS, Finding, lines


def drafter_limit(model: ModelEvidence) -> list[Finding]:
    """Return the limits that a part of the model's requests exceeds, wherever they were sent."""
    total = sum(max(each.contexts.values(), default=0.0) for each in model.backends)
    is_served = any(each.limit is None for each in model.backends)
    findings = []
    for limit in dict.fromkeys(each.limit for each in model.backends if each.limit is not None):
        limited = [each for each in model.backends if each.limit == limit]
        longer = sum(beyond(each.contexts, limit.tokens) for each in model.backends)
        if total < MIN_ANSWERS or longer < LEAST_GAIN * total:
            continue
        first, here = limited[0].name, sum(beyond(each.contexts, limit.tokens) for each in limited)
        change = lines(model.name, first, "speculative_config:", "  model: ... # a draft that serves longer contexts")
        if not is_served:
            beside = lines(model.name, "tree", "method: suffix # as one more replica: it drafts at any length")
            change = f"{beside}\n# or\n{change}"
        findings.append(
            Finding(
                "drafter_limit",
                model.name,
                ", ".join(each.name for each in limited),
                f"{longer / total:.0%} of the model's requests exceed the drafter's {limit.tokens:,} tokens",
                None,
                f"{longer:,.0f} of {total:,.0f} requests, of which {here:,.0f} were sent here: {limit.consequence}",
                change,
            )
        )
    return findings


def beyond(contexts: Mapping[float, float], tokens: int) -> float:
    """Return how many of the contexts counted up to each bound are longer, even in log length between two bounds.

    Examples
    --------
    >>> beyond({1024: 10, 2048: 60, 8192: 80, math.inf: 100}, 2048), beyond({2048: 0, 8192: 50, math.inf: 50}, 4096)
    (40.0, 25.0)
    """
    counted = sorted({0.0: 0.0, **contexts}.items())
    for (low, below), (high, upto) in pairwise(counted):
        if tokens <= high:
            share = math.log2(tokens / max(1.0, low)) / math.log2(high / max(1.0, low))
            return counted[-1][1] - below - share * (upto - below)
    return 0.0
