"""The guardrail: a randomised comparison of a policy with `least_loaded` on a small share of the traffic."""

from __future__ import annotations

import logging
import math
from random import Random
from typing import Final, NamedTuple

from policies.decision import Outcome
from policies.policy import GuardrailSettings

log = logging.getLogger(__name__)


class Comparison(NamedTuple):
    """What a guardrail has found.

    Parameters
    ----------
    ratio
        Seconds per unit of work of the policy over those of `least_loaded`.
    low, high
        Interval of the ratio; NaN below 40 requests of each.
    own, control
        Requests of the policy and of `least_loaded`, discounted by age.
    """

    ratio: float
    low: float
    high: float
    own: float
    control: float


class _Group:
    """Exponentially decaying sums of one arm of the comparison."""

    __slots__ = ("count", "squares", "total")

    def __init__(self) -> None:
        self.count = self.total = self.squares = 0.0

    def add(self, value: float) -> None:
        self.count = _KEEP * self.count + 1.0
        self.total = _KEEP * self.total + value
        self.squares = _KEEP * self.squares + value * value

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance_of_mean(self) -> float:
        return max(1e-6, self.squares / self.count - self.mean**2) / self.count


class Guardrail:
    """A comparison of a policy with `least_loaded` on randomly assigned requests.

    The metric is the logarithm of seconds per unit of work. The work (tokens) is known only afterwards, but does not
    depend on the backend. The test is evaluated after every request and keeps its level nevertheless: it is the mixture
    sequential probability ratio test [1]_ with a normal mixture of standard deviation `_EFFECT`.

    If the policy is found to be worse, it is frozen: `least_loaded` decides for all requests except the same
    small share, which shows when the policy is better again.

    Attributes
    ----------
    frozen
        Whether the policy was found to be worse and is out of use.
    freezes
        Number of freezes so far.

    References
    ----------
    .. [1] Johari, Koomen, Pekelis and Walsh, "Always Valid Inference: Continuous Monitoring of A/B Tests", Operations
       Research 70(3), 2022.

    Examples
    --------
    >>> guardrail = Guardrail(GuardrailSettings(share=0.1))
    >>> for _ in range(200):
    ...     guardrail.observe(0.010, control=True)
    ...     guardrail.observe(0.030, control=False)
    >>> guardrail.frozen, guardrail.control_share()
    (True, 0.9)
    """

    def __init__(self, settings: GuardrailSettings) -> None:
        self.frozen = False
        self.freezes = 0
        # Copied, because reading a pydantic field takes as long as everything that is done with it per request.
        self._share, self._tolerance, self._confidence = settings.share, settings.tolerance, settings.confidence
        self._start_over()

    def control_share(self) -> float:
        """Return the share of requests for which `least_loaded` decides at present."""
        return 1.0 - self._share if self.frozen else self._share

    def draw(self, rng: Random) -> bool:
        """Return whether `least_loaded` decides for the next request, at random."""
        share = self.control_share()
        return share > 0 and rng.random() < share

    def observe(self, seconds_per_work: float, *, control: bool) -> None:
        """Add an outcome, and freeze or thaw the policy if the comparison is conclusive."""
        if seconds_per_work <= 0 or self._share == 0:
            return
        group = self._control if control else self._own
        group.add(math.log(seconds_per_work))
        if self._control.count < _MIN_COUNT or self._own.count < _MIN_COUNT:
            return
        ratio = self.ratio
        margin = math.log(ratio) - math.log1p(self._tolerance)
        if not self.frozen and margin > 0 and self._is_certain(margin):
            self.frozen, self.freezes = True, self.freezes + 1
            log.warning("policy frozen: it takes %.2f times as long as least_loaded", ratio)
            self._start_over()
        elif self.frozen and ratio < 1 and self._is_certain(math.log(ratio)):
            self.frozen = False
            log.warning("policy back in use: it takes %.2f times as long as least_loaded", ratio)
            self._start_over()

    @property
    def ratio(self) -> float:
        """Seconds per unit of work of the policy over those of `least_loaded`; NaN until both have outcomes."""
        if not self._control.count or not self._own.count:
            return math.nan
        return math.exp(self._own.mean - self._control.mean)

    def comparison(self, confidence: float) -> Comparison:
        """Return the ratio with an interval that may be looked at at any time, and as often as one likes.

        It holds the ratios that the test of this class would not reject at `confidence`.
        """
        own, control = self._own, self._control
        low = high = math.nan
        if own.count >= _MIN_COUNT and control.count >= _MIN_COUNT:
            difference, variance = own.mean - control.mean, own.variance_of_mean + control.variance_of_mean
            margin = margin_at_any_time(variance, confidence)
            low, high = math.exp(difference - margin), math.exp(difference + margin)
        return Comparison(self.ratio, low, high, own.count, control.count)

    def thaw(self) -> None:
        """Put the policy back in use on an operator's request, and restart the comparison."""
        self.frozen = False
        self._start_over()

    def _is_certain(self, difference: float) -> bool:
        variance = self._own.variance_of_mean + self._control.variance_of_mean
        mixture = _EFFECT**2
        log_ratio = 0.5 * math.log(variance / (variance + mixture)) + 0.5 * difference**2 * mixture / (
            variance * (variance + mixture)
        )
        return log_ratio > -math.log(1.0 - self._confidence)

    def _start_over(self) -> None:
        self._own, self._control = _Group(), _Group()


def margin_at_any_time(variance: float, confidence: float) -> float:
    """Return how far a difference may be from its estimate, by an interval that holds however often it is looked at.

    With the variance V of the estimate and that of the mixture T, the test of `Guardrail` rejects no difference within

        sqrt(V (V + T) / T (2 log(1 / (1 - confidence)) + log((V + T) / V))).

    Examples
    --------
    >>> round(margin_at_any_time(0.01, 0.95), 3)
    0.308
    """
    both = variance + _EFFECT**2
    bound = -2.0 * math.log(1.0 - confidence) + math.log(both / variance)
    return math.sqrt(variance * both * bound) / _EFFECT


def seconds_per_work(outcome: Outcome) -> float:
    """Return the seconds of a request per unit of work: an output token, or 50 prompt tokens."""
    return outcome.e2e_s / (outcome.output_tokens + WORK_PER_PROMPT_TOKEN * outcome.prompt_tokens)


WORK_PER_PROMPT_TOKEN: Final = 0.02
"""Work of a prompt token, relative to an output token: thousands of prompt tokens are computed at a time."""
_KEEP: Final = 0.9995
"""Decay per observation; about the last two thousand count."""
_MIN_COUNT: Final = 40
_EFFECT: Final = 0.2
