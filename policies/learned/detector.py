"""The detector: finds replicas that have become slower, or have fewer of their drafts accepted."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from backends.backend import Candidate
from policies.features.request import RequestFeatures

log = logging.getLogger(__name__)

T = TypeVar("T")

EVIDENCE: Final = 11.5
"""Log-likelihood ratio of an alarm: a healthy replica reaches it at most once in e^11.5, some 100,000, answers."""
MOST_SHARE: Final = 0.6
"""Share of `EVIDENCE` that one client can contribute while there are others; with a single client, one template."""
EVIDENT_TOKENS: Final = 16
"""Tokens of an answer below which its drafts are no evidence."""
ALONE: Final = 300
"""Answers in a row of one client after which it counts as the only one."""
_RECENT: Final = 64
_ALMOST_ALL: Final = 0.9
"""Share of recent answers of one client from which a template counts as its only one."""
SLOW: Final = 2.0
"""Factor on step times of the fault that the test looks for."""
FEW: Final = 0.4
"""Share of the expected accepted drafts below which an answer indicates a fault."""
KNOWN: Final = 40.0
"""Answers of a kind of request below which a deviation may be the expectation's fault."""
LEAST_GAIN: Final = 0.2
"""Expected accepted tokens per step below which an answer is no evidence: silence would look the same."""
SILENT: Final = 0.1
"""Share up to which a drafter counts as silent: even mismatched heads have more."""
REST_S: Final = 20.0
"""Seconds without requests under policies that do not price findings; each relapse doubles them."""
LONGEST_S: Final = 600.0
HALF_LIFE_S: Final = 10.0
"""Half-life of a slowness without new evidence, so that a slow replica is tried again."""

UNKNOWN: Final = "unknown"
"""Cause of a fault that follows no change of the engine; others are values of `EngineChange`."""

Found = tuple[float, float]
"""Factor on step times, and share of the drafts accepted as expected."""


class Fault:
    """A finding about a replica."""

    def __init__(self, what: str, level: float, now_s: float) -> None:
        self.what = what  # `slow`, `poor` or `silent`
        self.level = level  # log of the factor, or the share
        self.since_s = self.seen_s = now_s
        self.expected = self.observed = math.nan  # tokens per step of the answer that raised the alarm
        self.cause = UNKNOWN
        self.half_life_s = HALF_LIFE_S
        self.answers = 0

    def __str__(self) -> str:
        """Return the finding in words."""
        if self.what == "slow":
            return f"its steps take {math.exp(self.level):.1f} times as long as expected"
        after = "" if self.cause == UNKNOWN else f" {self.cause.replace('_', ' ')}"
        if self.what == "silent":
            return f"its drafter is silent{after}: {self.level:.0%} of the accepted drafts that were expected"
        return f"its drafts are accepted less{after}: {self.level:.0%} of what was expected"


class Sources:
    """Recent clients: whether there is only one, and if so, hardly more than one template."""

    def __init__(self) -> None:
        self._client, self._in_a_row = "", ALONE
        self._recent: deque[str] = deque()  # templates
        self._counts: dict[str, int] = {}  # of them

    def see(self, request: RequestFeatures, tokens: int) -> str | None:
        """Count an answer; return its source of evidence, None if that is the only one."""
        if tokens >= EVIDENT_TOKENS:  # short answers, as of probes, do not count as another client
            self._count(request.client, request.template)
        if self._in_a_row <= ALONE or (self._recent and request.client != self._client):
            return request.client
        return request.template if self._counts.get(request.template, 0) < _ALMOST_ALL * len(self._recent) else None

    def _count(self, client: str, template: str) -> None:
        if client != self._client:
            self._in_a_row = 0 if self._client else self._in_a_row
            self._client = client
        self._in_a_row += 1
        recent, counts = self._recent, self._counts
        recent.append(template)
        counts[template] = counts.get(template, 0) + 1
        if len(recent) > _RECENT:
            oldest = recent.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]


class _Test(Generic[T]):
    """Page's cumulative sum of log-likelihood ratios, kept at zero or above, and lessons held until it ends."""

    def __init__(self, most: float) -> None:
        self._most = most  # evidence of one answer
        self.total = self.level = 0.0
        self.drafts: tuple[int, int] | None = None  # the engine's counters at the start of the evidence
        self.held: list[T] = []
        self._by_source: dict[str | None, float] = {}

    def add(self, ratio: float, level: float, source: str | None, drafts: tuple[int, int]) -> bool:
        """Add an answer; return whether the evidence suffices for an alarm."""
        if ratio < 0.0:
            keep = max(0.0, 1.0 + ratio / self.total) if self.total else 0.0
            self._by_source = {name: keep * own for name, own in self._by_source.items()} if keep else {}
        elif source in self._by_source or len(self._by_source) < _MOST_SOURCES:
            own = self._by_source.get(source, 0.0) + min(ratio, self._most)
            self._by_source[source] = own if source is None else min(own, MOST_SHARE * EVIDENCE)
            self.level += _NEW * (level - self.level) if self.total else level - self.level
            if not self.total:
                self.drafts = drafts
        self.total = sum(self._by_source.values())
        return self.total >= EVIDENCE

    def has_enough_of(self, source: str | None) -> bool:
        """Return whether a source has contributed all that it may."""
        return source is not None and self._by_source.get(source, 0.0) >= MOST_SHARE * EVIDENCE

    def reset(self) -> None:
        """Drop the evidence."""
        self.total, self._by_source = 0.0, {}

    def release(self) -> list[T]:
        """Return and clear the held lessons."""
        held, self.held = self.held, []
        return held


class _Count:
    """Counts of one kind of answer from healthy replicas: those with few accepted drafts, and all."""

    __slots__ = ("all", "few")

    def __init__(self) -> None:
        self.few = self.all = 0.0


class _Watch(Generic[T]):
    """The tests of one replica, and their findings."""

    def __init__(self) -> None:
        self.speed, self.drafting = _Test[T](_MOST_OF_STEPS), _Test[T](_MOST_OF_DRAFTS)
        self.slow: Fault | None = None
        self.poor: Fault | None = None
        self.rest_s, self.rests_until_s = REST_S, 0.0
        # Kinds of the answers since the evidence began, and whether they had few accepted drafts.
        self.answers: deque[tuple[tuple[str, str, str], bool]] = deque()
        self.change = UNKNOWN  # the last change of its engine


class Detector(Generic[T]):
    """Two sequential tests [1]_ for each replica; they change nothing until they find something.

    Each answer gives the ratios of its step time and of its tokens per step to their expectations. The sum of the
    log-likelihood ratios of a fault over health, kept at zero or above, reaches h in health at most once in exp(h)
    answers [2]_. One client contributes at most `MOST_SHARE` of it. A finding follows later answers until they are as
    expected. Lessons from answers are held while there is evidence, and dropped on an alarm.

    References
    ----------
    .. [1] Page, "Continuous Inspection Schemes", Biometrika 41(1/2), 1954.
    .. [2] Lorden, "Procedures for Reacting to a Change in Distribution", Annals of Mathematical Statistics 42(6), 1971.
    """

    def __init__(self) -> None:
        self.found: dict[str, tuple[Fault, ...]] = {}  # by replica
        self.reasons: dict[str, str] = {}  # in words, of replicas that are slow or whose drafts are accepted less
        self.silent: dict[str, Fault] = {}
        self._watches: dict[str, _Watch[T]] = {}
        self._sources = Sources()
        self._counts: dict[tuple[str, str, str], _Count] = {}  # by kind

    def see(self, request: RequestFeatures, tokens: int) -> str | None:
        """Count an answer with this many tokens; return its source of evidence."""
        return self._sources.see(request, tokens)

    def effect(self, name: str, now_s: float) -> Found:
        """Return the current effect of the findings about a replica."""
        if name not in self.found:
            return 1.0, 1.0
        watch = self._watches[name]
        slow = 1.0
        if watch.slow is not None:
            slow = math.exp(watch.slow.level)
            slow = 1.0 + (slow - 1.0) * math.exp2(-abs(now_s - watch.slow.seen_s) / watch.slow.half_life_s)
        return slow, 1.0 if watch.poor is None else min(1.0, max(0.0, watch.poor.level))

    def observe_speed(self, name: str, ratio: float, source: str | None, now_s: float) -> None:
        """Test the ratio of an answer's step time to the fitted one."""
        watch, level = self._watch(name), max(-2.0, min(2.0, math.log(ratio)))
        finding = watch.slow
        if finding is None:
            if watch.speed.add(_SLOW_WEIGHT * (level - _SLOW_MIDDLE), level, source, (0, 0)):
                watch.slow = Fault("slow", watch.speed.level, now_s)
                self._alarm(name, watch, watch.slow)
                watch.speed = _Test(_MOST_OF_STEPS)
        else:
            finding.level += _FOLLOWS * (level - finding.level)
            if now_s - finding.seen_s > finding.half_life_s:  # it was retried
                finding.half_life_s = min(LONGEST_S, 2.0 * finding.half_life_s)
            finding.seen_s = now_s
            if finding.level < _RECOVERED_SLOW:
                watch.slow = None
                self._end(name, watch, finding)

    def observe_drafts(
        self,
        name: str,
        kind: tuple[str, str, str],
        expected: float | None,
        observed: float,
        source: str | None,
        drafts: tuple[int, int],
        learned: T | None,
        now_s: float,
    ) -> Sequence[T]:
        """Test the tokens per step of an answer against the expectation, if there is one; return what may be learned.

        The test is whether an answer has less than `FEW` of the expected accepted drafts. How often that happens on
        healthy replicas is counted by `kind` of request (arm, workload and bins), whatever its variance.
        """
        watch = self._watch(name)
        if expected is None or expected - 1.0 < LEAST_GAIN:
            return self._hold(watch, learned)
        share, finding = (observed - 1.0) / (expected - 1.0), watch.poor
        if finding is not None:
            finding.level += _FOLLOWS * (min(1.5, share) - finding.level)
            finding.seen_s = now_s
            finding.answers += 1
            if finding.level > _RECOVERED_POOR:
                watch.poor, watch.change = None, UNKNOWN
                self._end(name, watch, finding)
            return self._hold(watch, learned)
        counted = self._counts.get(kind)
        few, count = (0.0, 0.0) if counted is None else (counted.few, counted.all)
        usual = (few + _PRIOR_FEW) / (count + _PRIOR_COUNT)
        is_few = share < FEW
        if not (is_few and watch.drafting.has_enough_of(source)):  # no evidence, and no sign of health
            watch.answers.append((kind, is_few))
        if count < KNOWN or usual > _MOST_USUAL:
            self._count(watch, 0)
            return self._hold(watch, learned)
        ratio = math.log(_OF_FAULTY / usual) if is_few else math.log((1.0 - _OF_FAULTY) / (1.0 - usual))
        if watch.drafting.add(ratio, share, source, drafts):
            gain = _gain(watch.drafting.drafts or drafts, drafts)
            if gain is not None and gain > FEW * (expected - 1.0):  # its engine's counters disagree
                watch.drafting.reset()
            else:
                what = "silent" if watch.drafting.level <= SILENT else "poor"
                finding = watch.poor = Fault(what, watch.drafting.level, now_s)
                finding.cause, finding.expected, finding.observed = watch.change, expected, observed
                self._alarm(name, watch, finding)
                watch.drafting, watch.answers = _Test(_MOST_OF_DRAFTS), deque()
                return ()
        if watch.drafting.total == 0.0:
            watch.change = watch.change if is_few else UNKNOWN  # it drafts, despite the change
        self._count(watch, 0 if watch.drafting.total == 0.0 else _SOON)
        return self._hold(watch, learned)

    def renew(self, name: str, change: str = UNKNOWN) -> None:
        """Reset the tests of a replica, since its engine has changed."""
        watch = self._watches[name] = _Watch()
        watch.change = change
        self._list(name)

    def forget(self, name: str) -> None:
        """Drop what is known about a replica that has left."""
        self._watches.pop(name, None)
        self._list(name)

    def admitted(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        """Return the candidates except resting ones, or all if none would be left."""
        if not self.found:
            return candidates
        until_s = {name: self._watches[name].rests_until_s for name in self.found}
        resting = {name for name, at_s in until_s.items() if 0.0 < at_s - now_s <= LONGEST_S}  # else a clock reset
        return [one for one in candidates if one.name not in resting] or candidates

    def _count(self, watch: _Watch[T], latest: int) -> None:
        """Count the answers of a replica as healthy, except the `latest` newest, which may soon show a fault."""
        while len(watch.answers) > latest:
            kind, is_few = watch.answers.popleft()
            counted = self._counts.get(kind)
            if counted is None:
                if len(self._counts) >= _MOST_KINDS:
                    del self._counts[next(iter(self._counts))]
                counted = self._counts[kind] = _Count()
            counted.few = _KEEP * counted.few + is_few
            counted.all = _KEEP * counted.all + 1.0

    def _hold(self, watch: _Watch[T], learned: T | None) -> Sequence[T]:
        test = watch.drafting
        if watch.poor is not None and watch.poor.answers < _STAYS:  # after that, it is normal for the replica
            return ()
        if test.total == 0.0 and not test.held:
            return () if learned is None else (learned,)
        if learned is not None:
            test.held.append(learned)
        if test.total == 0.0 or len(test.held) > _MOST_HELD:
            return test.release()
        return ()

    def _watch(self, name: str) -> _Watch[T]:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = _Watch()
        return watch

    def _alarm(self, name: str, watch: _Watch[T], finding: Fault) -> None:
        watch.rests_until_s = finding.since_s + watch.rest_s
        watch.rest_s = min(LONGEST_S, 2 * watch.rest_s)
        self._list(name, watch.slow, watch.poor)
        log.warning("%s does otherwise than it did: %s", name, finding)

    def _end(self, name: str, watch: _Watch[T], finding: Fault) -> None:
        self._list(name, watch.slow, watch.poor)
        if not self.found.get(name):
            watch.rest_s = REST_S
        log.warning("%s is as expected again, which was %s", name, finding.what)

    def _list(self, name: str, *findings: Fault | None) -> None:
        """Replace the findings about a replica."""
        found = tuple([one for one in findings if one is not None])
        for table in (self.found, self.reasons, self.silent):
            table.pop(name, None)
        if found:
            self.found[name] = found
        for one in found:
            if one.what == "silent":
                self.silent[name] = one
            else:
                self.reasons[name] = str(one)


def _gain(before: tuple[int, int], now: tuple[int, int]) -> float | None:
    """Return the accepted tokens per draft between two readings of an engine's counters; None if too few."""
    steps, accepted = now[0] - before[0], now[1] - before[1]
    return accepted / steps if steps >= _LEAST_DRAFTS else None


_OF_FAULTY: Final = 0.85
"""Share of a faulty replica's answers with few accepted drafts."""
_PRIOR_FEW, _PRIOR_COUNT = 3.0, 20.0
"""Imaginary answers of each kind at the start."""
_MOST_USUAL: Final = 0.7
"""Usual share of such answers beyond which they are no evidence: a faulty replica would look much the same."""
_SOON: Final = 24
"""Answers within which a fault is found."""
_KEEP: Final = 0.999
_MOST_KINDS: Final = 1024
_STEP_SPREAD: Final = 0.15
"""Standard deviation of log(step time) of healthy replicas; it is 0.02 to 0.04, but stalls come in clusters."""
_SLOW_HEALTHY: Final = 0.0
_SLOW_WEIGHT: Final = (math.log(SLOW) - _SLOW_HEALTHY) / _STEP_SPREAD**2
_SLOW_MIDDLE: Final = (math.log(SLOW) + _SLOW_HEALTHY) / 2
_MOST_OF_STEPS, _MOST_OF_DRAFTS = 4.0, 3.0
"""Most evidence of one answer, so that at least three, or four, must agree."""
_NEW: Final = 0.5
_FOLLOWS: Final = 0.4
_RECOVERED_SLOW: Final = math.log(1.3)
_RECOVERED_POOR: Final = 0.6
_STAYS: Final = 100
"""Answers after which a finding is learned as normal for the replica."""
_MOST_HELD: Final = 256
_MOST_SOURCES: Final = 256
_LEAST_DRAFTS: Final = 50
