"""The loads of a live run: a trace at each rate or in each closed loop, at each temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from typing import NamedTuple

from backends.validation import UsageError
from lab.live.session import LiveLoad
from lab.replay.options import ReplayOptions
from lab.replay.pace import paced

_LEAST, _TURNS = 24, 6  # requests of a closed loop: at least, and per concurrent one


class Condition(NamedTuple):
    """What all endpoints of a run share.

    Examples
    --------
    >>> str(Condition(4.0, None, 0.7)), str(Condition(None, 8, None)), str(Condition(None, None, None))
    ('4 requests/s, temperature 0.7', '8 requests at once', 'the rate of the trace')
    """

    rate: float | None  # requests per second; None: the trace's
    at_once: int | None  # requests in flight in a closed loop, which has no rate
    temperature: float | None  # None: the requests' own

    def __str__(self) -> str:
        words = "the rate of the trace" if self.rate is None else f"{self.rate:g} requests/s"
        words = words if self.at_once is None else f"{self.at_once} requests at once"
        return words if self.temperature is None else f"{words}, temperature {self.temperature:g}"


def loads_of(options: ReplayOptions) -> Mapping[Condition, LiveLoad]:
    """Return the requests under each condition, in sending order."""
    if options.concurrency and (options.rate or options.for_s):
        raise UsageError("--concurrency: a closed loop has no --rate and no --for; give one of them")
    if options.for_s and not options.rate:
        raise UsageError("--for: give the requests per second with --rate")
    records = list(islice(options.records(in_order=True), options.limit))
    endless = cycle(records)
    paces: Sequence[tuple[float | None, int | None]] = [(None, many) for many in options.concurrency]
    paces = paces or [(rate, None) for rate in options.rate or (None,)]
    loads = {}
    for temperature, (rate, many) in product(options.temperature or (None,), paces):
        sent = records
        if many is not None:  # an engine's cache from one loop must not help another
            sent = list(islice(endless, options.limit or max(_LEAST, _TURNS * many)))
        elif rate is not None and options.for_s is not None:
            count = max(1, round(rate * options.for_s))
            sent = [replace(one, arrived_at=None) for one in islice(endless, count)]
        if temperature is not None:
            sent = [replace(one, temperature=temperature) for one in sent]
        seed = options.seed or 0
        timed = [(0.0, one) for one in sent] if many else paced(sent, rate, options.speed, seed)
        loads[Condition(rate, many, temperature)] = LiveLoad.of(timed, options.warmup, many)
    return loads
