"""Is the learned policy really better? A small random share of the traffic goes by `least_loaded`, to tell."""

from __future__ import annotations

import logging
import math
from random import Random
from typing import Final

from policies.learned.settings import GuardrailSettings

log = logging.getLogger(__name__)


class _Group:
    """Sums of one group, in which each observation weighs less as later ones come."""

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
    """Compares the learned policy with `least_loaded` on requests that were assigned at random.

    What is compared is the logarithm of seconds per unit of work, where work is known only afterwards but does not
    depend on where the request went (the tokens of its answer). The test may be looked at after every request without
    losing its level: the mixture sequential probability ratio test of Johari, Pekelis and Walsh, "Always Valid
    Inference", Operations Research 70(3), 2022, with a normal mixture of standard deviation `_EFFECT`.

    While it is frozen all requests go by `least_loaded` but for the same small share, which tells when to go back.

    Attributes
    ----------
    frozen
        The learned policy was found worse, and is not used.
    freezes
        How often that has happened.
    """

    def __init__(self, settings: GuardrailSettings) -> None:
        self.frozen = False
        self.freezes = 0
        # Read once: a field of the settings takes as long to read as all that is done with it for a request.
        self._share, self._tolerance, self._confidence = settings.share, settings.tolerance, settings.confidence
        self._start_over()

    def control_share(self) -> float:
        """Return the share of requests that are to go by `least_loaded` now."""
        return 1.0 - self._share if self.frozen else self._share

    def draw(self, rng: Random) -> bool:
        """Draw whether the next request goes by `least_loaded`."""
        share = self.control_share()
        return share > 0 and rng.random() < share

    def observe(self, seconds_per_work: float, *, control: bool) -> None:
        """Take in what a request came to, and freeze or go back where that is clear."""
        if seconds_per_work <= 0 or self._share == 0:
            return
        group = self._control if control else self._learned
        group.add(math.log(seconds_per_work))
        if self._control.count < _LEAST or self._learned.count < _LEAST:
            return
        ratio = self.ratio
        margin = math.log(ratio) - math.log1p(self._tolerance)
        if not self.frozen and margin > 0 and self._is_certain(margin):
            self.frozen, self.freezes = True, self.freezes + 1
            log.warning("the learned policy took %.2f times what least_loaded takes: frozen", ratio)
            self._start_over()
        elif self.frozen and ratio < 1 and self._is_certain(math.log(ratio)):
            self.frozen = False
            log.warning("the learned policy takes %.2f times what least_loaded takes: used again", ratio)
            self._start_over()

    @property
    def ratio(self) -> float:
        """Seconds per work of the learned policy over those of `least_loaded`; NaN before both were seen."""
        if not self._control.count or not self._learned.count:
            return math.nan
        return math.exp(self._learned.mean - self._control.mean)

    def thaw(self) -> None:
        """Use the learned policy again, and forget what was held against it: an operator knows better."""
        self.frozen = False
        self._start_over()

    def _is_certain(self, difference: float) -> bool:
        variance = self._learned.variance_of_mean + self._control.variance_of_mean
        mixture = _EFFECT**2
        log_ratio = 0.5 * math.log(variance / (variance + mixture)) + 0.5 * difference**2 * mixture / (
            variance * (variance + mixture)
        )
        return log_ratio > -math.log(1.0 - self._confidence)

    def _start_over(self) -> None:
        self._learned, self._control = _Group(), _Group()


_KEEP: Final = 0.9995
"""Per observation of a group: about the last two thousand count."""
_LEAST: Final = 40
_EFFECT: Final = 0.2
