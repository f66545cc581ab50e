"""What a gateway process reports to the others that serve the same pool, its peers: its present state, as a whole.

A report replaces the one before it, so one that was lost is made up for by the next.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import orjson
from pydantic import ConfigDict, Field, TypeAdapter

from backends.reported import MOST_COUNT
from gateway.relay.limits import KeyUse
from policies.features.prompt import MAX_PREFIXES

_MAX_BYTES = 4 << 20

Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Amount = Annotated[float, Field(ge=0.0, le=MOST_COUNT)]
Seconds = Annotated[float, Field(ge=-MOST_COUNT, le=MOST_COUNT)]
Prefixes = Annotated[tuple[int, ...], Field(max_length=MAX_PREFIXES)]


class Ejection(NamedTuple):
    """A replica that the process has ejected on evidence of its own."""

    number: Count  # counted by the process, from 1: an ejection is applied once
    left_s: Amount  # seconds left of it when the report was written
    reason: str


class Draining(NamedTuple):
    """Whether a replica is drained, as an operator has said at one of the processes."""

    number: Count  # grows with each time that it is said: the last one counts
    drained: bool


class SentPrompt(NamedTuple):
    """A prompt that was sent to a replica, which has it cached since then."""

    replica: str
    prefixes: Prefixes  # their hashes, shortest first
    lengths: Prefixes  # in tokens


class Report(NamedTuple):
    """The state of a process."""

    writer: str  # unique name of the process, never reused
    number: Count  # grows with each report of the process
    in_flight: dict[str, Count]
    keys: dict[str, KeyUse]  # its use of the keys with limits, by the ids of their clients
    ejected: dict[str, Ejection]
    # Tokens so far of its answers whose steps are known, and these steps, by replica.
    answered: dict[str, tuple[Amount, Amount]]
    draining: dict[str, Draining]
    responses: dict[str, str]  # the backends that hold the stored responses of the last seconds, by response id
    prompts: list[list[SentPrompt]]  # since the report before, between that and the one before it, and so on
    served_s: dict[str, dict[str, Seconds]]  # what it has served each client, by its id, and by model with a queue
    format: Literal[5] = 5

    def encode(self) -> bytes:
        """Return the report as JSON."""
        return orjson.dumps(tuple(self), default=tuple)  # it takes no subclass of a tuple


_REPORT = TypeAdapter(Report, config=ConfigDict(strict=True, allow_inf_nan=False))


def decode(data: bytes) -> Report:
    """Return the report in `data`; raise `ValueError` if it is none."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"a report of {len(data)} bytes")
    return _REPORT.validate_json(data)
