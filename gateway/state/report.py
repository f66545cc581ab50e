"""What a gateway process reports to the others that serve the same pool, its peers: its present state, as a whole.

A report replaces the one before it, so one that was lost is made up for by the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import orjson

from backends.reported import MOST_COUNT, finite, whole
from gateway.relay.limits import KeyUse

_FORMAT = 3
_MAX_BYTES = 4 << 20


class Ejection(NamedTuple):
    """A replica that the process has ejected on evidence of its own."""

    number: int  # counted by the process, from 1: an ejection is applied once
    left_s: float  # seconds left of it when the report was written
    reason: str


class Draining(NamedTuple):
    """Whether a replica is drained, as an operator has said at one of the processes."""

    number: int  # grows with each time that it is said: the last one counts
    drained: bool


class Report(NamedTuple):
    """The state of a process."""

    writer: str  # unique name of the process, never reused
    number: int  # grows with each report of the process
    in_flight: dict[str, int]
    keys: dict[str, KeyUse]  # its use of the keys with limits, by name
    ejected: dict[str, Ejection]
    # Tokens so far of its answers whose steps are known, and these steps, by replica.
    answered: dict[str, tuple[float, float]]
    draining: dict[str, Draining]
    responses: dict[str, str]  # the backends that hold the stored responses of the last seconds, by response id

    def encode(self) -> bytes:
        """Return the report as JSON."""
        return orjson.dumps([_FORMAT, *self], default=tuple)  # it takes no subclass of a tuple


def decode(data: bytes) -> Report:
    """Return the report in `data`."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"a report of {len(data)} bytes")
    try:
        version, writer, number, in_flight, keys, ejected, answered, draining, responses = orjson.loads(data)
        if version != _FORMAT:
            raise ValueError(f"a report of format {version}")
        return Report(
            str(writer),
            _count(number),
            {str(replica): _count(count) for replica, count in in_flight.items()},
            {str(key): _use(use) for key, use in keys.items()},
            {
                str(replica): Ejection(_count(count), _number(left_s), str(why))
                for replica, (count, left_s, why) in ejected.items()
            },
            {str(replica): (_number(tokens), _number(steps)) for replica, (tokens, steps) in answered.items()},
            {str(replica): Draining(_count(count), bool(drained)) for replica, (count, drained) in draining.items()},
            {str(response): str(backend) for response, backend in responses.items()},
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a report: {error}") from None


def _use(use: Iterable[object]) -> KeyUse:
    requests, tokens, requests_before, tokens_before, in_flight, requests_left, tokens_left = use
    return KeyUse(
        _count(requests),
        _count(tokens),
        _count(requests_before),
        _count(tokens_before),
        _count(in_flight),
        _number(requests_left, -MOST_COUNT),
        _number(tokens_left, -MOST_COUNT),
    )


def _count(value: object) -> int:
    if (count := whole(value, MOST_COUNT)) is None:
        raise ValueError(f"a report with a count of {str(value)[:20]}")
    return count


def _number(value: object, least: float = 0.0) -> float:
    if (number := finite(value, MOST_COUNT, least)) is None:
        raise ValueError(f"a report with a number of {str(value)[:20]}")
    return number
