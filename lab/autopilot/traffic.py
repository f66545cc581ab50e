"""The traffic recorded of late: requests to plan on, and what a comparison needs of each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.autopilot.control import Seen
from lab.replay.request import ReplayRequest, replay_request
from lab.trace import TraceRecord, read_trace
from policies.features.request import Endpoint
from policies.guarded.guardrail import WORK_PER_PROMPT_TOKEN

MOST = 300_000
"""Most records used of a period; of more, the latest."""
_PART, _PARTS = 500, 16
_BEFORE_S = 60.0
_SERVER_ERROR = 500
_LATE_S = 3600.0
"""How much longer than its arrival a request may take to be written."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorder's folder, as far as it holds one model.

    Parameters
    ----------
    sample
        Share of the requests that is recorded.
    default_temperature
        Of requests without one.
    """

    folder: Path
    model: str
    sample: float = 1.0
    default_temperature: float = 1.0

    def between(self, start_s: float, end_s: float) -> list[TraceRecord]:
        """Return the records that arrived in a period (Unix time), in order of arrival; at most `MOST`."""
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file() and _may_hold(path, start_s)]
        kept = deque(self._of(files, start_s, end_s), maxlen=MOST)
        return sorted(kept, key=lambda record: record.arrived_at or 0.0)

    def rate(self, now_s: float, period_s: float) -> float:
        """Return the requests per second that arrived of late, and have ended."""
        return len(self.between(now_s - period_s, now_s)) / period_s / self.sample

    def _of(self, files: Sequence[Path], start_s: float, end_s: float) -> Iterator[TraceRecord]:
        if not files:
            return
        for record in read_trace(files, format="gateway"):
            at_s = record.arrived_at
            if at_s is not None and start_s <= at_s < end_s and record.model == self.model:
                yield record

    def requests(self, records: Sequence[TraceRecord], longest: int) -> list[ReplayRequest]:
        """Return requests to plan on: all, or sixteen stretches of 500 neighbours, spread evenly.

        Parameters
        ----------
        longest
            Most tokens of prompt and answer; longer requests are left out.
        """
        usable = [one for one in records if _served(one) and one.prompt_tokens + (one.output_tokens or 1) <= longest]
        if len(usable) > _PART * _PARTS:
            starts = [round(number * (len(usable) - _PART) / (_PARTS - 1)) for number in range(_PARTS)]
            usable = [one for start in starts for one in usable[start : start + _PART]]
        # A sample of a Poisson stream is one with a lower rate: time runs faster, so that the load is right.
        return [replay_request(one, self.sample * (one.arrived_at or 0.0), self.default_temperature) for one in usable]


def seen(records: Sequence[TraceRecord], sample: float = 1.0) -> list[Seen]:
    """Return what a comparison needs of records in order of arrival, except those of the first minute."""
    recent: deque[float] = deque()
    result = []
    for record in records:
        at_s = record.arrived_at or 0.0
        recent.append(at_s)
        while recent[0] < at_s - _BEFORE_S:
            recent.popleft()
        if at_s - (records[0].arrived_at or 0.0) < _BEFORE_S or record.endpoint == Endpoint.OTHER:
            continue  # at first the load is not known
        if record.status is None:
            continue
        failed = record.status >= _SERVER_ERROR or bool(record.error and record.status < 400)
        work = (record.output_tokens or 0) + WORK_PER_PROMPT_TOKEN * record.prompt_tokens
        if not failed and not (_served(record) and record.e2e_s and work):
            continue
        # By the rate of arrivals, not by requests in flight: a slow fleet has more of those at the same load.
        load = round(math.log(len(recent) / sample, 1.25))
        value = math.nan if failed else math.log((record.e2e_s or 1.0) / work)
        result.append(Seen(at_s, (_kind(record), load), value))
    return result


def shifted(requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    """Return the requests, all arriving at once."""
    return [replace(request, arrived_s=0.0) for request in requests]


def _kind(record: TraceRecord) -> tuple[object, ...]:
    """Return what kind of request it is: nothing in it depends on the replica that served it."""
    code = "code" if (record.code_share or 0.0) >= 0.1 else "text"
    lengths = (_band(record.prompt_tokens), _band(record.output_tokens or 0))
    return record.workload or code, *lengths, bool(record.temperature), bool(record.stream)


def _band(tokens: int) -> int:
    """Return a band of lengths that grow by four."""
    return (max(tokens, 32).bit_length() - 6) // 2


def _served(record: TraceRecord) -> bool:
    return (
        record.status == 200 and not record.error and record.endpoint != Endpoint.OTHER and bool(record.output_tokens)
    )


def _may_hold(path: Path, start_s: float) -> bool:
    return path.stat().st_mtime >= start_s
