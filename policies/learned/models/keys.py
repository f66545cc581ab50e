"""The bucket of a request: observations of similar requests are added up under one key."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from heapq import nlargest
from typing import Final
from zlib import crc32

from policies.features.request import RequestFeatures
from policies.statistics import Sums

REQUESTS: Final = 2
"""Number of requests that make a template of what they share."""

MOST: Final = 4096
"""Maximum templates that are told apart."""


class Templates:
    """Which templates were seen more than once."""

    def __init__(self, most: int = MOST) -> None:
        # Maximum templates that are counted, and that are known; the oldest one is dropped for a further one.
        self._most = most
        self._fitted: frozenset[str] = frozenset()
        self._known: dict[str, None] = {}
        self._counted: dict[str, int] = {}

    def key(self, request: RequestFeatures, *, counts: bool = True) -> Key:
        """Return the bucket key of a request, in which a template that is not known is replaced by that of its client.

        So what one client's requests are like is not expected of those of others.
        """
        key = key_of(request)
        template = request.template
        if template and self._knows(template, counts=counts):
            return key
        own = template_of_client(request.client) if request.client else ""
        if own and self._knows(own, counts=counts):
            return with_template(key, own)
        return without_template(key)

    def learn(self, fitted: frozenset[str]) -> None:
        """Also recognize the templates in the fitted statistics, which may come from other gateways or earlier runs."""
        self._fitted = fitted

    def _knows(self, template: str, *, counts: bool) -> bool:
        return template in self._known or template in self._fitted or (counts and self._count(template))

    def _count(self, template: str) -> bool:
        """Count a request; return whether its template is known now."""
        count = self._counted.pop(template, 0) + 1
        if count < REQUESTS:
            if len(self._counted) >= self._most:
                del self._counted[next(iter(self._counted))]
            self._counted[template] = count
            return False
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[template] = None
        return True


def fitted_templates(buckets: Mapping[Key, Sums]) -> frozenset[str]:
    """Return the templates with enough observations among lengths: at most `MOST`, those seen most."""
    counts: dict[str, float] = {}
    for key, sums in buckets.items():
        if template := key[TEMPLATE]:
            counts[template] = counts.get(template, 0.0) + sums[0]
    often = [template for template, count in counts.items() if count >= REQUESTS]
    return frozenset(nlargest(MOST, often, key=counts.__getitem__))


TEMPERATURES: Final = (0.05, 0.35, 0.65, 0.85, 1.05)
OVERLAPS: Final = (0.02, 0.06, 0.12, 0.25, 0.5)
PROMPT_TOKENS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PROMPT_BOUNDS: Final = (8, *PROMPT_TOKENS, 2 * PROMPT_TOKENS[-1])
LIMITS: Final = (32, 128, 512, 2048)
"""Bounds between bins; a value equal to a bound belongs to the upper bin."""

RESTRICTED: Final = "restricted"
"""The shape of answers from which tokens were kept."""

WORKLOAD, TEMPLATE, TEMPERATURE, OVERLAP, PROMPT, TURNS, SHAPE, LIMIT = range(8)
"""Indices into a key."""

Key = tuple[str, ...]


def key_of(request: RequestFeatures) -> Key:
    """Return the bucket key of a request."""
    limit = request.max_tokens
    return (
        request.workload,
        request.template,
        _NAMES[bisect_right(TEMPERATURES, request.temperature)],
        _NAMES[bisect_right(OVERLAPS, request.overlap)],
        _NAMES[bisect_right(PROMPT_TOKENS, request.prompt_tokens)],
        _TURNS[request.thinking][request.turns > 1],
        RESTRICTED
        if request.restricted
        else "structured"
        if request.structured
        else "code"
        if request.code_share > 0.3
        else "text",
        "" if limit is None else _NAMES[bisect_right(LIMITS, limit)],
    )


def typical_prompt_tokens(key: Key) -> float:
    """Return the middle of a key's bin of prompt lengths.

    Examples
    --------
    >>> typical_prompt_tokens(("chat", "", "0", "0", "0")), round(typical_prompt_tokens(("chat", "", "0", "0", "1")))
    (16.0, 45)
    """
    index = int(key[PROMPT])
    return math.sqrt(PROMPT_BOUNDS[index] * PROMPT_BOUNDS[index + 1])


def thinking_of(key: Key) -> str:
    """Return what is asked of thinking: "thinks", "plain" or, for the model's own way, nothing."""
    return key[TURNS].partition("/")[2]


def without_template(key: Key) -> Key:
    """Return the key without its template, which merges buckets when there are too many."""
    return with_template(key, "")


def with_template(key: Key, template: str) -> Key:
    """Return the key with another template."""
    return (*key[:-7], template, *key[-6:])


@lru_cache(maxsize=MOST)
def template_of_client(client: str) -> str:
    """Return what stands for the template of a client's requests without one; it is no word of a rule's condition."""
    return f"@{crc32(client.encode()):08x}"


_TURNS: Final = {
    None: ("first", "later"),
    True: ("first/thinks", "later/thinks"),
    False: ("first/plain", "later/plain"),
}
"""First or later in a conversation, and what is asked of thinking: in one part, so that older keys remain keys."""
_NAMES: Final = tuple(str(number) for number in range(16))
