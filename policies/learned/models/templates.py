"""The templates that `learned` tells apart: those that have come again.

A template is the head of a system prompt or of a first line (`policies.features.template`), so a prompt that nobody
sends again has one too. What is observed of such a request is added to the requests without a template instead: under a
key of its own it would teach nothing about others, and fill the statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import Final

from policies.features.request import RequestFeatures
from policies.learned.models.buckets import TEMPLATE, Key, key_of, without_template
from policies.statistics import Sums

REQUESTS: Final = 2
"""Number of requests that make a template of what they share."""

MOST: Final = 4096
"""Maximum templates that are told apart."""


class Templates:
    """Which templates were seen more than once.

    Examples
    --------
    >>> from policies.features.request import Endpoint
    >>> templates, request = Templates(), RequestFeatures("llama", Endpoint.CHAT, template="a3989997")
    >>> templates.key(request)[1], templates.key(request)[1]
    ('', 'a3989997')
    """

    def __init__(self, most: int = MOST) -> None:
        # Maximum templates that are counted, and that are known; the oldest one is dropped for a further one.
        self._most = most
        self._fitted: frozenset[str] = frozenset()
        self._known: dict[str, None] = {}
        self._counted: dict[str, int] = {}

    def key(self, request: RequestFeatures, *, counts: bool = True) -> Key:
        """Return the bucket key of a request, without a template that is not known."""
        key = key_of(request)
        template = request.template
        if not template or template in self._known or template in self._fitted:
            return key
        if counts and self._count(template):
            return key
        return without_template(key)

    def learn(self, fitted: frozenset[str]) -> None:
        """Also recognize the templates in the fitted statistics, which may come from other gateways or earlier runs."""
        self._fitted = fitted

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
    """Return the templates with enough observations in the statistics of `length`, at most `MOST`, the most seen first.

    Examples
    --------
    >>> key = ("chat", "a3989997", "0", "0", "2", "first", "text", "")
    >>> fitted_templates({key: (25.0, 100.0, 500.0)})
    frozenset({'a3989997'})
    """
    counts: dict[str, float] = {}
    for key, sums in buckets.items():
        if template := key[TEMPLATE]:
            counts[template] = counts.get(template, 0.0) + sums[0]
    often = [template for template, count in counts.items() if count >= REQUESTS]
    return frozenset(nlargest(MOST, often, key=counts.__getitem__))
