"""The bucket of a request: observations of similar requests are added up under one key."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from policies.features.request import RequestFeatures

TEMPERATURES: Final = (0.05, 0.35, 0.65, 0.85, 1.05)
OVERLAPS: Final = (0.02, 0.06, 0.12, 0.25, 0.5)
PROMPT_TOKENS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LIMITS: Final = (32, 128, 512, 2048)
"""Bounds between bins; a value equal to a bound belongs to the upper bin."""

RESTRICTED: Final = "restricted"
"""The shape of answers from which tokens were kept."""

WORKLOAD, TEMPLATE, TEMPERATURE, OVERLAP, PROMPT, TURNS, SHAPE, LIMIT = range(8)
"""Indices into a key."""

Key = tuple[str, ...]


def key_of(request: RequestFeatures) -> Key:
    """Return the bucket key of a request.

    Examples
    --------
    >>> from policies.features.request import Endpoint
    >>> key_of(RequestFeatures("llama", Endpoint.CHAT, temperature=0.5, workload="code", prompt_tokens=100))
    ('code', '', '2', '0', '2', 'first', 'text', '')
    """
    limit = request.max_tokens
    return (
        request.workload,
        request.template,
        _NAMES[bisect_right(TEMPERATURES, request.temperature)],
        _NAMES[bisect_right(OVERLAPS, request.overlap)],
        _NAMES[bisect_right(PROMPT_TOKENS, request.prompt_tokens)],
        "first" if request.turns <= 1 else "later",
        RESTRICTED
        if request.restricted
        else "structured"
        if request.structured
        else "code"
        if request.code_share > 0.3
        else "text",
        "" if limit is None else _NAMES[bisect_right(LIMITS, limit)],
    )


def without_template(key: Key) -> Key:
    """Return the key without its template, which merges buckets when there are too many."""
    return (*key[:-7], "", *key[-6:])


_NAMES: Final = tuple(str(number) for number in range(16))
