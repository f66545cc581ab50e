"""The templates that `learned` tells apart: those that several different prompts have shared.

A template is the head of a system prompt or of a first line (`policies.features.template`), so a prompt that nobody
else sends has one too. What is observed of such a request is added to the requests without a template instead: under a
key of its own it would teach nothing about others, and fill the statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import Final

from policies.features.request import RequestFeatures
from policies.learned.models.buckets import TEMPLATE, Key, key_of, without_template
from policies.statistics import Sums

PROMPTS: Final = 4
"""Number of different prompts that make a template of what they share."""

MOST: Final = 4096
"""Maximum templates that are told apart."""


class Templates:
    """Which templates were seen often enough.

    The turns of a conversation share their head but are one prompt. So only prompts with the same number of turns count
    as different ones: the smallest number seen with that head.

    Parameters
    ----------
    most
        Maximum templates that are counted, and that are known; the oldest one is dropped for a further one.

    Examples
    --------
    >>> from policies.features.request import Endpoint
    >>> templates = Templates()
    >>> for tokens in (40, 40, 50, 60, 70):
    ...     request = RequestFeatures("llama", Endpoint.CHAT, template="a3989997", prompt_tokens=tokens)
    ...     print(templates.key(request)[1])
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    a3989997
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._fitted: frozenset[str] = frozenset()
        self._known: dict[str, None] = {}
        self._counted: dict[str, tuple[int, tuple[int, ...]]] = {}

    def key(self, request: RequestFeatures, *, counts: bool = True) -> Key:
        """Return the bucket key of a request, without a template that is not known.

        Parameters
        ----------
        counts
            Whether the request counts towards knowing its template; otherwise nothing changes.
        """
        key = key_of(request)
        template = request.template
        if not template or template in self._known or template in self._fitted:
            return key
        if counts and self._count(template, request):
            return key
        return without_template(key)

    def learn(self, fitted: frozenset[str]) -> None:
        """Know the templates of the statistics too, which may come from other gateways or an earlier run."""
        self._fitted = fitted

    def _count(self, template: str, request: RequestFeatures) -> bool:
        """Count a prompt; return whether its template is known now."""
        turns, prefix = request.turns, request.prefix
        prompt = hash((request.prompt_tokens, prefix[-1] if prefix else 0))
        fewest, prompts = self._counted.get(template, (turns, ()))
        if turns < fewest:
            fewest, prompts = turns, ()
        if turns > fewest or prompt in prompts:
            return False
        prompts = (*prompts, prompt)
        if len(prompts) < PROMPTS:
            if len(self._counted) >= self._most and template not in self._counted:
                del self._counted[next(iter(self._counted))]
            self._counted[template] = fewest, prompts
            return False
        self._counted.pop(template, None)
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
    often = [template for template, count in counts.items() if count >= PROMPTS]
    return frozenset(nlargest(MOST, often, key=counts.__getitem__))
