"""Silent drafters: replicas that should speculate, but whose drafts are no longer accepted."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from backends.backend import Candidate, EngineChange
from policies.features.request import ANY_REQUEST, RequestFeatures
from policies.guarded.evidence import EVIDENCE, UNCOUNTED, Drafts, Evidence, Sources

log = logging.getLogger(__name__)

UNKNOWN: Final = "unknown"
"""Cause of a silence that follows no change of the engine; the other causes are those of `EngineChange`."""

LEAST_GAIN: Final = 0.2
"""Expected gain (accepted tokens per step) below which a request is no evidence: silence would look the same."""
LEAST_TOKENS: Final = 16
"""Output tokens below which an answer is no evidence."""
QUIET: Final = 0.1
"""Share of the expected gain up to which an answer is quiet. No change of traffic is known to reach that: a mismatched
head still had 0.2, a trained one at temperature 1 more than 0.3 of what it had at 0."""
RECOVERED: Final = 0.3
"""Share of the expected gain from which an answer shows that drafts are accepted again."""
RETURN_ANSWERS: Final = 2
"""Answers in a row that must show it before the replica counts as drafting."""
REST_S: Final = 20.0
"""Seconds without requests after each quiet answer, under policies that do not predict."""

_QUIET_OF_SILENT: Final = 0.95
"""Share of the answers of a silent drafter that are quiet."""
_PRIOR_QUIET, _PRIOR_COUNT = 1.0, 20.0
"""Imaginary answers of a healthy arm at the start, and how many of them were quiet."""
_MOST_QUIET: Final = 0.9
_KEEP: Final = 0.999
"""Decay of the counts of quiet answers per answer."""
_MAX_EVIDENCE: Final = 2.0
"""Maximum evidence of one answer, so that at least six must agree."""
_MAX_HELD: Final = 256
_MOST_CLIENTS: Final = 256

Learned = tuple[tuple[str, ...], float, float, bool, float]
"""What would be learned from an answer: request key, tokens per step and weight, whether it is overlong, time."""


class Silence:
    """The state of a silent drafter."""

    def __init__(self, cause: str, since_s: float, expected: float, observed: float) -> None:
        # A value of `EngineChange` if nothing but quiet answers came since that change, else `UNKNOWN`.
        self.cause = cause
        self.since_s = since_s  # when it was noticed, on the clock of the policy
        # expected, observed: mean tokens per step that were expected of the answers that showed it, and that they had.
        self.expected = expected
        self.observed = observed

    def __str__(self) -> str:
        """Return the state in words."""
        when = "" if self.cause == UNKNOWN else f" {self.cause.replace('_', ' ')}"
        return (
            f"its drafter is silent{when}: {self.observed:.2f} tokens per step where {self.expected:.2f} were expected"
        )


class _Watch:
    """The observations of one backend."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.expected = self.observed = 0.0
        self.quiet = self.answers = 0
        self.accepted: dict[str, int] = {}  # answers in a row of a client that show it, while it is silent
        self.last_quiet_s = -math.inf
        self.change: EngineChange | None = None
        self.held: list[Learned] = []

    def clear(self) -> None:
        """Drop the evidence."""
        self.evidence.reset()
        self.expected = self.observed = 0.0
        self.quiet = self.answers = 0

    def reset(self) -> None:
        self.clear()
        self.accepted = {}
        self.held = []


class SilentDrafters:
    """A sequential test whether the drafts of each backend are still accepted.

    An answer is quiet if its gain is at most a tenth of what was expected of that very request, by its kind or by
    replaying its text. Changed traffic changes the expectation too, so it makes no quiet answers. Each answer adds its
    log-likelihood ratio of silence to the `Evidence`, given how often healthy backends of the arm were quiet; at
    `EVIDENCE` the drafter is silent, which a healthy backend counts as once in 100,000 answers at most.

    Nor may the requests of one client have a drafter taken for silent. Answers to requests that keep the model from
    tokens are no evidence, one client gives only a part of it (`Evidence`), and an engine that counts its drafts must
    agree: one that is silent accepts none, whoever asks.

    What is suspicious is not learned: while there is evidence, observations are held back. They are returned once the
    evidence is gone, and dropped if the drafter is found to be silent.
    """

    def __init__(self) -> None:
        self.silent: dict[str, Silence] = {}  # the present silence of each backend that is silent
        self._watches: dict[str, _Watch] = {}
        self._sources = Sources(is_known=True)
        self._arms: dict[str, tuple[float, float]] = {}  # quiet answers, and all, of healthy backends

    def is_suspect(self, backend: str) -> bool:
        """Return whether there is evidence against the drafter of a backend, or it is silent."""
        watch = self._watches.get(backend)
        return watch is not None and (watch.evidence.total > 0 or backend in self.silent)

    def observe(
        self,
        backend: str,
        arm: str,
        expected: float | None,
        observed: float,
        now_s: float,
        learned: Learned | None = None,
        request: RequestFeatures = ANY_REQUEST,
        drafts: Drafts = UNCOUNTED,
    ) -> Sequence[Learned]:
        """Compare the tokens per step of an answer with those expected, and return what may be learned now."""
        watch = self._watches.get(backend)
        if watch is None:
            watch = self._watches[backend] = _Watch()
        gain = 0.0 if expected is None else expected - 1.0
        counts = expected is not None and gain >= LEAST_GAIN and not request.restricted
        if backend in self.silent:
            if counts:
                self._observe_silent(backend, watch, (observed - 1.0) / gain, now_s, request.client)
            return () if backend in self.silent or learned is None else (learned,)
        if expected is not None and counts:
            self._add(backend, arm, watch, expected, observed, now_s, request, drafts)
        if learned is not None:
            watch.held.append(learned)
        if backend in self.silent:
            watch.held = []
        elif watch.evidence.total == 0.0:
            released, watch.held = watch.held, []
            return released
        elif len(watch.held) > _MAX_HELD:
            return (watch.held.pop(0),)
        return ()

    def renew(self, backend: str, change: EngineChange) -> bool:
        """Reset the evidence against a backend whose engine has changed; return whether it was silent."""
        watch = self._watches.get(backend)
        if watch is None:
            watch = self._watches[backend] = _Watch()
        watch.reset()
        watch.change = change
        return self.silent.pop(backend, None) is not None

    def forget(self, backend: str) -> None:
        """Drop the observations of a backend that has left."""
        self._watches.pop(backend, None)
        self.silent.pop(backend, None)

    def admitted(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        """Return the candidates without the silent ones that rest, or all if none would be left."""
        if not self.silent:
            return candidates
        resting = {name for name in self.silent if now_s - self._watches[name].last_quiet_s < REST_S}
        return [candidate for candidate in candidates if candidate.name not in resting] or candidates

    def _add(
        self,
        backend: str,
        arm: str,
        watch: _Watch,
        expected: float,
        observed: float,
        now_s: float,
        request: RequestFeatures,
        drafts: Drafts,
    ) -> None:
        """Add an answer to the evidence."""
        quiet, count = self._arms.get(arm, (0.0, 0.0))
        share = min(_MOST_QUIET, (quiet + _PRIOR_QUIET) / (count + _PRIOR_COUNT))
        watch.answers += 1
        if is_quiet := observed - 1.0 <= QUIET * (expected - 1.0):
            ratio = min(_MAX_EVIDENCE, math.log(_QUIET_OF_SILENT / share))
            watch.quiet += 1
            watch.expected += expected
            watch.observed += observed
            watch.last_quiet_s = now_s
        else:
            ratio = math.log((1.0 - _QUIET_OF_SILENT) / (1.0 - share))
        alone = self._sources.see(request)
        watch.evidence.add(ratio, request, alone, drafts)
        if watch.evidence.total == 0.0:
            if not is_quiet:
                watch.change = None  # the engine drafts, whatever it went through
            self._arms[arm] = _KEEP * quiet + watch.quiet, _KEEP * count + watch.answers
            watch.clear()
        elif watch.evidence.total >= EVIDENCE and (gain := watch.evidence.gain(drafts)) is not None:
            is_accused_by_one = not alone[0] and watch.evidence.client() is not None
            if gain > QUIET * (watch.expected / watch.quiet - 1.0) or (gain < 0.0 and is_accused_by_one):
                watch.clear()  # its engine counts accepted drafts; or it counts none, and there are others to ask
                return
            cause = UNKNOWN if watch.change is None else watch.change.value
            silence = Silence(cause, now_s, watch.expected / watch.quiet, watch.observed / watch.quiet)
            watch.accepted = {}
            self.silent[backend] = silence
            log.warning("%s counts as slow: %s", backend, silence)

    def _observe_silent(self, backend: str, watch: _Watch, share: float, now_s: float, client: str) -> None:
        if share <= QUIET:
            watch.accepted.pop(client, None)
            watch.last_quiet_s = now_s
        elif share >= RECOVERED and len(watch.accepted) < _MOST_CLIENTS:
            watch.accepted[client] = watch.accepted.get(client, 0) + 1
            if watch.accepted[client] >= RETURN_ANSWERS:
                del self.silent[backend]
                watch.reset()
                watch.change = None
                log.warning("%s drafts again", backend)
