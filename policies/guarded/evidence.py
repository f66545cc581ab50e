"""Evidence against a backend, of which one client gives only a part while there are others."""

from __future__ import annotations

import math
from typing import Final

from policies.features.request import RequestFeatures

EVIDENCE: Final = 11.5
"""Log-likelihood ratio at which a backend is accused; a healthy one gets there less than once in 100,000 answers."""

MOST_SHARE: Final = 0.6
"""Share of it that a single source can give while there are others."""

ALONE_ANSWERS: Final = 300
"""Answers in a row of a single source after which it counts as the only one."""


Drafts = tuple[int, int]
"""Steps with a draft, and accepted tokens, as an engine counts them since its start."""

UNCOUNTED: Final = (0, 0)
"""Of an engine that does not count them."""

_LEAST_DRAFTS: Final = 50
"""Drafts that an engine must have counted since the evidence began, for its counters to say something."""


class Sources:
    """Who was answered: whether a single client, or a single template, is the only one of late."""

    __slots__ = ("_client", "_client_answers", "_template", "_template_answers")

    def __init__(self, *, is_known: bool) -> None:
        # Answers in a row of the last client and of the last template; where the sources of old are known, the first
        # of each counts as the only one.
        self._client_answers = self._template_answers = ALONE_ANSWERS if is_known else 0
        self._client: str | None = None
        self._template: str | None = None

    def see(self, request: RequestFeatures) -> tuple[bool, bool]:
        """Add an answer; return whether the client of its request, and the template, are the only ones."""
        if request.client != self._client:
            if self._client is not None:
                self._client_answers = 0
            self._client = request.client
        if request.template != self._template:
            if self._template is not None:
                self._template_answers = 0
            self._template = request.template
        self._client_answers += 1
        self._template_answers += 1
        return self._client_answers > ALONE_ANSWERS, self._template_answers > ALONE_ANSWERS


class Evidence:
    """Page's cumulative sum [1]_ of log-likelihood ratios, kept at zero or above, against one backend.

    A client's requests may be such that a healthy backend looks broken. So while there are several clients, one gives
    at most `MOST_SHARE` of what an accusation takes. Where there is one client, or none has a key, the same holds of
    templates; what follows concerns that client only (`client`). That only lowers the sum, so its bound on false
    accusations [2]_ holds. Where the engine counts its drafts, it is a witness of all its answers since the evidence
    began (`gain`).

    References
    ----------
    .. [1] Page, "Continuous Inspection Schemes", Biometrika 41(1/2), 1954.
    .. [2] Lorden, "Procedures for Reacting to a Change in Distribution", Annals of Mathematical Statistics 42(6), 1971.

    """

    __slots__ = ("_by_client", "_by_source", "_drafts", "_sources", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._drafts: list[Drafts] = []  # as reported when the evidence began, and next
        self._by_source: dict[str, float] = {}  # by client, or by template
        self._by_client: dict[str, float] = {}
        self._sources = Sources(is_known=False)

    def add(
        self,
        log_likelihood: float,
        request: RequestFeatures,
        alone: tuple[bool, bool],
        drafts: Drafts = UNCOUNTED,
    ) -> None:
        """Add the log-likelihood ratio of an answer; `alone` is what `Sources.see` says over all backends."""
        if self.total == 0.0:
            self._drafts = [drafts]
        elif len(self._drafts) < 2 and drafts != self._drafts[0]:  # those before were partly of before the evidence
            self._drafts.append(drafts)
        here = self._sources.see(request)
        if log_likelihood < 0.0:
            self._reduce(-log_likelihood)
            return
        most, source = MOST_SHARE * EVIDENCE, request.client
        if alone[0] or here[0]:
            source = request.template
            if alone[1] or here[1]:
                most = math.inf
        before = self._by_source.get(source, 0.0)
        gain = min(log_likelihood, max(0.0, most - before))
        if before or len(self._by_source) < _MOST_SOURCES:
            self._by_source[source] = before + gain
            self._by_client[request.client] = self._by_client.get(request.client, 0.0) + gain
            self.total += gain

    def client(self) -> str | None:
        """Return the client whose evidence it is; None if the others have given their part of it."""
        for client, own in self._by_client.items():
            if self.total - own < (1.0 - MOST_SHARE) * EVIDENCE - _ROUNDING:
                return client
        return None

    def gain(self, drafts: Drafts) -> float | None:
        """Return the accepted tokens per draft since the evidence began, as the engine counts them.

        None if that is not known yet; negative if it does not count them.
        """
        if drafts[0] == 0:
            return -1.0
        steps, accepted = drafts[0] - self._drafts[-1][0], drafts[1] - self._drafts[-1][1]
        return None if len(self._drafts) < 2 or steps < _LEAST_DRAFTS else accepted / steps

    def reset(self) -> None:
        """Drop the evidence."""
        self.total = 0.0
        self._by_source, self._by_client = {}, {}

    def _reduce(self, amount: float) -> None:
        """Take an amount from the evidence, whoever gave it."""
        if amount >= self.total:
            self.reset()
            return
        share = 1.0 - amount / self.total
        self.total *= share
        self._by_source = {source: share * each for source, each in self._by_source.items()}
        self._by_client = {client: share * each for client, each in self._by_client.items()}


_MOST_SOURCES: Final = 256
_ROUNDING: Final = 1e-6
