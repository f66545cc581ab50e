"""The traffic recorded of late: requests to plan on, and what a comparison needs of each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.autopilot.control import Seen
from lab.replay.request import ReplayRequest, replay_request
from lab.trace import TraceRecord, read_trace
from policies.features.request import Endpoint
from policies.guarded.guardrail import WORK_PER_PROMPT_TOKEN

MOST = 300_000
"""Most requests compared in a period; of more, the latest."""
_PART, _PARTS = 500, 16
_BEFORE_S = 60.0
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorder's folder, as far as it holds one model. Periods are given in Unix time, and read as often as needed.

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

    def between(self, start_s: float, end_s: float) -> Iterator[TraceRecord]:
        """Yield the records that arrived in a period, as they ended."""
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file() and path.stat().st_mtime >= start_s]
        if not files:
            return
        for record in read_trace(files, format="gateway"):
            at_s = record.arrived_at
            if at_s is not None and start_s <= at_s < end_s and record.model == self.model:
                yield record

    def rate(self, now_s: float, period_s: float) -> float:
        """Return the requests per second that arrived of late, and have ended."""
        return sum(1 for _ in self.between(now_s - period_s, now_s)) / period_s / self.sample

    def seen(self, start_s: float, end_s: float) -> list[Seen]:
        """Return what a comparison needs of the requests of a period."""
        return seen(self.between(start_s, end_s), self.sample)

    def requests(self, start_s: float, end_s: float, longest: int) -> list[ReplayRequest]:
        """Return requests to plan on, in order of arrival: all, or sixteen stretches of 500 neighbours, spread evenly.

        Parameters
        ----------
        longest
            Most tokens of prompt and answer; longer requests are left out.
        """

        def usable() -> Iterator[TraceRecord]:
            for one in self.between(start_s, end_s):
                if _served(one) and one.prompt_tokens + (one.output_tokens or 1) <= longest:
                    yield one

        at_s = np.sort(np.fromiter((one.arrived_at or 0.0 for one in usable()), np.float64))
        first = np.array([0])
        size = len(at_s)
        if size > _PART * _PARTS:
            first, size = np.linspace(0, size - _PART, _PARTS).round().astype(int), _PART
        begins, ends = at_s[first[: len(at_s)]], at_s[(first + size - 1)[: len(at_s)]]

        pause_s = float(np.mean(ends - begins)) / size if len(begins) else 0.0
        shifts_s = np.cumsum(np.append(0.0, begins[1:] - ends[:-1] - pause_s))
        placed = []
        for one in usable():
            stretch = int(np.searchsorted(begins, one.arrived_at or 0.0, "right")) - 1
            if stretch >= 0 and (one.arrived_at or 0.0) <= ends[stretch]:  # one stretch follows the other
                placed.append(((one.arrived_at or 0.0) - float(shifts_s[stretch]), one))
        placed.sort(key=lambda pair: pair[0])
        # A sample of a Poisson stream is one with a lower rate: time runs faster, so that the load is right.
        return [replay_request(one, self.sample * at_s, self.default_temperature) for at_s, one in placed]


def seen(records: Iterable[TraceRecord], sample: float = 1.0) -> list[Seen]:
    """Return what a comparison needs of records, in order of arrival, except those of the first minute."""
    known = (
        (one.arrived_at or 0.0, _kind(one), value)
        for one in records
        if one.endpoint != Endpoint.OTHER and (value := _value(one)) is not None
    )
    ordered = sorted(deque(known, maxlen=MOST), key=lambda one: one[0])
    recent: deque[float] = deque()
    result = []
    for at_s, kind, value in ordered:
        recent.append(at_s)
        while recent[0] < at_s - _BEFORE_S:
            recent.popleft()
        if at_s - ordered[0][0] >= _BEFORE_S:  # before that the load is not known
            # By the rate of arrivals, not by requests in flight: a slow fleet has more of those at the same load.
            result.append(Seen(at_s, (kind, round(math.log(len(recent) / sample, 1.25))), value))
    return result


def _value(record: TraceRecord) -> float | None:
    """Return the logarithm of the seconds per unit of work; NaN if an engine failed, None if nothing was to be had."""
    if record.status is None:
        return None
    if record.status >= _SERVER_ERROR or (record.error and record.status < 400):
        return math.nan
    work = (record.output_tokens or 0) + WORK_PER_PROMPT_TOKEN * record.prompt_tokens
    return math.log(record.e2e_s / work) if _served(record) and record.e2e_s and work else None


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
