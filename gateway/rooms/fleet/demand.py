"""Forecasts the traffic at the time when a replica started now is up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

DAY_MINUTES: Final = 24 * 60
START_UP_MINUTES: Final = 5
"""Minutes until a replica serves: engines take 70 s to five minutes to load."""
HOUR_MINUTES: Final = 60
SHORT_MINUTES: Final = 5
"""Minutes over which a rate is measured."""
_LONG_MINUTES: Final = 15
"""Minutes that traffic must be gone before replicas are removed: they take as long to come back."""
_MOST_GROWTH: Final = 2.0


class Minute(NamedTuple):
    """The requests that ended within a minute."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    engine_tokens: float = 0.0  # output tokens counted by the engines, for all their clients
    # finished, finish_s: requests whose time to finish is known, and its sum.
    finished: float = 0.0
    finish_s: float = 0.0


class Rates(NamedTuple):
    """Requests and tokens per second."""

    requests: float
    prompt_tokens: float
    output_tokens: float


def present(minutes: Sequence[Minute]) -> Rates:
    """Return the current rates, over all clients of the engines."""
    return _rates(np.array(minutes)[-SHORT_MINUTES:].mean(0), minutes)


def usual(minutes: Sequence[Minute]) -> Rates:
    """Return the rates that the average request met."""
    counted = np.array(minutes)
    weights = counted[:, 0] / counted[:, 0].sum()
    return _rates(weights @ counted, minutes)


def finish_s(minutes: Sequence[Minute]) -> float:
    """Return the measured mean seconds to finish; NaN without any."""
    *_, finished, seconds = np.array(minutes).sum(0).tolist()
    return seconds / finished if finished else math.nan


def forecast(minutes: Sequence[Minute], day: int = DAY_MINUTES, ahead: int = START_UP_MINUTES) -> Rates:
    """Return the largest rates to expect until a replica is up: recent ones with their growth, and those of a day ago.

    Parameters
    ----------
    minutes
        The last minutes in order, a day and more if known.
    day, ahead
        Minutes of a day, and until a replica is up.
    """
    counted = np.array(minutes)
    recent, before = counted[-SHORT_MINUTES:].mean(0), counted[-2 * SHORT_MINUTES : -SHORT_MINUTES]
    rise = np.maximum(0.0, recent - before.mean(0)) / SHORT_MINUTES if len(before) == SHORT_MINUTES else 0.0
    expected = np.maximum(recent + (ahead + SHORT_MINUTES / 2) * rise, counted[-_LONG_MINUTES:].mean(0))
    if (now := len(counted) - day) >= SHORT_MINUTES:
        hour = min(HOUR_MINUTES, day // 24, now)
        growth = counted[-hour:].sum(0) / np.maximum(counted[now - hour : now].sum(0), 1.0)
        then = counted[now - SHORT_MINUTES : now + ahead + SHORT_MINUTES]
        means = np.lib.stride_tricks.sliding_window_view(then, SHORT_MINUTES, axis=0).mean(-1)
        expected = np.maximum(expected, means.max(0) * np.clip(growth, 1.0 / _MOST_GROWTH, _MOST_GROWTH))
    return _rates(expected, minutes)


def _rates(per_minute: np.ndarray[tuple[int, ...], np.dtype[np.float64]], minutes: Sequence[Minute]) -> Rates:
    """Return rates per second, scaled up by the traffic that other gateways and clients sent in the last hour."""
    _, _, own, engines, *_ = np.array(minutes)[-HOUR_MINUTES:].sum(0).tolist()
    others = max(1.0, engines / own) if own else 1.0
    requests, prompt_tokens, output_tokens, *_ = (per_minute * others / 60.0).tolist()
    return Rates(requests, prompt_tokens, output_tokens)
