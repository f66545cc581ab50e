"""What a gateway process reports to its peers: its entire current state.

A report replaces the previous one, so the next makes up for one that is lost.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import orjson
from pydantic import ConfigDict, Field, TypeAdapter

from backends.reported import MOST_COUNT
from gateway.relay.limits import KeyUse
from gateway.routing.sticky import Home
from policies.features.prompt import MAX_PREFIXES

_MAX_BYTES = 4 << 20

Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Amount = Annotated[float, Field(ge=0.0, le=MOST_COUNT)]
Seconds = Annotated[float, Field(ge=-MOST_COUNT, le=MOST_COUNT)]
Prefixes = Annotated[tuple[int, ...], Field(max_length=MAX_PREFIXES)]


class Ejection(NamedTuple):
    """A replica that the process ejected on its own evidence."""

    number: Count  # counted by the process, from 1: an ejection is applied once
    left_s: Amount  # seconds left when the report was written
    reason: str


class Draining(NamedTuple):
    """Whether an operator drained a replica, at any of the processes."""

    number: Count  # grows with each change: the highest one counts
    drained: bool


class SentPrompt(NamedTuple):
    """A prompt sent to a replica, which has it cached since."""

    replica: str
    prefixes: Prefixes  # their hashes, shortest first
    lengths: Prefixes  # in tokens


class Report(NamedTuple):
    """The state of a process."""

    writer: str  # unique name of the process, never reused
    number: Count  # grows with each report of the process
    in_flight: dict[str, Count]
    keys: dict[str, KeyUse]  # its use of keys with limits, by client id
    ejected: dict[str, Ejection]
    # Total tokens and steps of its answers whose steps are known, by replica.
    answered: dict[str, tuple[Amount, Amount]]
    draining: dict[str, Draining]
    responses: dict[str, Home]  # backends that hold the responses stored in the last seconds, by response id
    prompts: list[list[SentPrompt]]  # new since the previous report, new in that one, and so on
    served_s: dict[str, dict[str, Seconds]]  # by model with a queue: what it served, by client id
    format: Literal[6] = 6

    def encode(self) -> bytes:
        """Return the report as JSON."""
        return orjson.dumps(tuple(self), default=tuple)  # orjson accepts no subclass of tuple


_REPORT = TypeAdapter(Report, config=ConfigDict(strict=True, allow_inf_nan=False))


def decode(data: bytes) -> Report:
    """Return the report in `data`; raise `ValueError` if it is none."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"a report of {len(data)} bytes")
    return _REPORT.validate_json(data)
