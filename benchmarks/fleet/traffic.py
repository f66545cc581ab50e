"""Days of traffic: what requests are like, and how many of them come at each hour."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.routing.ground import REPORTED, read
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.table import RequestTable, request_table
from lab.trace.edits import draw
from lab.trace.read import read_trace
from lab.trace.record import TraceRecord

SMALL, LARGE = "llama-3.1-8b-h100", "llama-3.1-70b-4xh100"
GROWTH = 1.1
"""Traffic of the second day over that of the first."""
CONTEXT = 131_072


class Kind(NamedTuple):
    """One kind of work, and when it comes."""

    share: float  # of the peak
    peak_hour: float
    depth: float  # share of its peak that is missing at its quietest


class Traffic(NamedTuple):
    """Days of traffic."""

    read: Callable[[Path | None], Mapping[str, Sequence[ReplayRequest]]]  # by kind, in the order in which they come
    kinds: Mapping[str, Kind]
    calibration: str
    peak: float  # requests per second
    ttft_s: float
    tpot_s: float

    def days(self, data: Path | None, hours: float) -> Sequence[ReplayRequest]:
        """Return two days of so many hours, the second busier, with uneven rates within minutes."""
        rng, found = np.random.default_rng(0), self.read(data)
        made: list[ReplayRequest] = []
        for name, kind in self.kinds.items():
            rows, expected = found[name], expected_by_minute(kind, self.peak, hours, rng)
            count = int(expected[-1])
            if isinstance(rows, RequestTable):  # all of the traffic
                table = rows.in_sessions(1.0, 1.0, 1 + count // len(rows), 0)
                at_s = np.interp(table.order.arrived_s, expected, 60.0 * np.arange(len(expected)), right=math.inf)
                return table[: np.searchsorted(at_s, math.inf)].paced(at_s[np.isfinite(at_s)])
            at_s = np.interp(np.sort(rng.uniform(0.0, count, count)), expected, 60.0 * np.arange(len(expected)))
            made += [replace(rows[number % len(rows)], arrived_s=time) for number, time in enumerate(at_s.tolist())]
        return sorted(made, key=lambda one: one.arrived_s)


def expected_by_minute(kind: Kind, peak: float, hours: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return how many requests are expected by the beginning of each minute, and by the end of the last."""
    minutes = np.arange(round(2 * hours * 60))
    hour = minutes / 60.0 / hours * 24.0
    swing = 1.0 - kind.depth * (0.5 - 0.5 * np.cos((hour - kind.peak_hour) / 24.0 * 2.0 * math.pi))
    uneven = rng.lognormal(-0.005, 0.1, len(minutes))
    per_minute = 60.0 * peak * kind.share * np.where(hour < 24.0, 1.0, GROWTH) * swing * uneven
    return np.concatenate([[0.0], np.cumsum(per_minute)])


def _made(data: Path | None) -> dict[str, list[ReplayRequest]]:
    """Return requests of lognormal lengths."""
    rng, rows = np.random.default_rng(0), dict[str, list[ReplayRequest]]()
    for kind, means in {"chat": (1200, 350), "code": (2000, 250), "summary": (3000, 200)}.items():
        lengths = np.maximum(8, np.array(means) * rng.lognormal(-0.18, 0.6, (20_000, 2))).astype(int).tolist()
        records = [TraceRecord(prompt_tokens=each[0], output_tokens=each[1], workload=kind) for each in lengths]
        rows[kind] = [replay_request(one, 0.0, 0.0) for one in records]
    return rows


def _azure(data: Path | None) -> dict[str, list[ReplayRequest]]:
    assert data is not None
    traces = {"chat": "conv", "code": "code"}
    return {
        kind: [
            replay_request(replace(one, workload=kind), 0.0, 0.0)
            for one in read_trace([data / f"azure2023/AzureLLMInferenceTrace_{name}.csv.gz"])
        ]
        for kind, name in traces.items()
    }


def _short(path: Path) -> list[TraceRecord]:
    """Return the requests of a trace that fit into the context."""
    return [one for one in read_trace([path]) if one.prompt_tokens + (one.output_tokens or 0) <= CONTEXT]


@cache
def _sessions(folder: Path) -> RequestTable:
    """Return the reported half of the sessions, which each process reads once."""
    logging.disable(logging.WARNING)
    paths = [path for path in sorted(folder.glob("*.json.gz")) if draw(path.name) % 2 == REPORTED]
    return _files.enter_context(request_table([one for path in paths for one in _short(path)], 0.0))


_files = ExitStack()  # of the tables


def _mooncake(data: Path | None) -> dict[str, list[ReplayRequest]]:
    assert data is not None
    records = _short(data / "mooncake/synthetic_trace.jsonl.gz")
    return {"chat": [replay_request(one, 0.0, 0.0) for one in records[len(records) // 2 :]]}


def _agents(data: Path | None) -> dict[str, Any]:
    assert data is not None
    return {"code": _sessions(data / "agent_sessions")}


def _recorded(data: Path | None) -> dict[str, list[ReplayRequest]]:
    assert data is not None
    return read(data / "specdecode_bench", REPORTED)


TRAFFIC = {
    "made": Traffic(
        _made,
        {"chat": Kind(0.45, 15.0, 0.75), "code": Kind(0.35, 11.0, 0.95), "summary": Kind(0.20, 2.0, 0.6)},
        LARGE, peak=18.0, ttft_s=2.0, tpot_s=0.025,
    ),
    "azure": Traffic(
        _azure, {"chat": Kind(0.6, 15.0, 0.75), "code": Kind(0.4, 11.0, 0.95)},
        LARGE, peak=22.0, ttft_s=2.0, tpot_s=0.05,
    ),
    "mooncake": Traffic(_mooncake, {"chat": Kind(1.0, 15.0, 0.75)}, SMALL, peak=5.0, ttft_s=5.0, tpot_s=0.05),
    "agents": Traffic(_agents, {"code": Kind(1.0, 11.0, 0.95)}, SMALL, peak=0.8, ttft_s=20.0, tpot_s=0.05),
    "recorded": Traffic(
        _recorded, {"chat": Kind(0.5, 15.0, 0.9), "code": Kind(0.5, 3.0, 0.9)},
        SMALL, peak=110.0, ttft_s=1.0, tpot_s=0.012,
    ),
}  # fmt: skip
"""Days by name. Azure's and Mooncake's hour is repeated in its order at the rates of a day; sessions of agents, and
recorded requests whose suffix and EAGLE-3 steps are known, come at its rates."""
