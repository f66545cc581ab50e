"""The replay of the past: replays each recorded request where and when it was sent, and compares with the record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from lab.past.pool import Means, SimulatedPool
from lab.report.terminal import text_table
from lab.simulation.simulate import replay
from lab.simulation.table import RequestTable
from lab.statistics import TIMES, Floats, cell

ERROR = 0.10
"""Error of a replica's mean time or time per token beyond which a forecast is unreliable."""
_WINDOW, _WINDOWS = 4000, 5
_FEW = 16
_CORRECTIONS, _CLOSE = 4, 0.02
HEADINGS = ["recorded", "requests", *(head for _, title, _ in TIMES for head in (title, "replayed", "error"))]
_NAMES = {"e2e_s": "mean time", "ttft_s": "time to the first token", "tpot_s": "time per token"}
_JUDGED = ("e2e_s", "tpot_s")


@dataclass(frozen=True, slots=True)
class Compared:
    """Mean times of a replica in seconds, recorded and replayed, over the same requests."""

    name: str
    requests: int
    recorded: Means  # by `e2e_s`, `ttft_s` and `tpot_s`; None if no request has one
    replayed: Means

    def error(self, time: str) -> float | None:
        """Return the relative error of a replayed mean."""
        recorded, replayed = self.recorded[time], self.replayed[time]
        return replayed / recorded - 1.0 if recorded and replayed is not None else None


@dataclass(frozen=True, slots=True)
class PastReplay:
    """How a replay of the past compares with the record."""

    pool: SimulatedPool
    replicas: tuple[Compared, ...] = ()

    @property
    def error(self) -> float | None:
        """The largest error of a mean time or time per token, as an absolute value; None if nothing was compared."""
        return max((abs(error) for error, *_ in self._errors()), default=None)

    def said(self) -> str:
        """Return the largest errors in words."""
        if not self.replicas:
            few = "too few" if self.pool.is_fitted else "no"
            return f"How far this is off is not known: the trace has {few} times of these replicas."
        worst = [max(found, key=lambda one: abs(one[0])) for time in _NAMES if (found := self._errors(time))]
        errors = ", ".join(f"{error:+.1%} in the {what} of {name}" for error, what, name in worst)
        start = "Not to be relied on: a" if (self.error or 0.0) > ERROR else "A"
        of = ", on requests that the fit has not seen" if self.pool.is_fitted else ""
        unknown = [one.name for one in self.pool.replicas if one.name not in {each.name for each in self.replicas}]
        rest = f" For {', '.join(unknown)} it is not known: the trace has too few of their times." if unknown else ""
        return f"{start} replay of the past is off by at most {errors}{of}.{rest}"

    def beside(self, verdict: str) -> str:
        """Return a verdict with the replay's error, which comes first if it is large."""
        parts = [verdict, self.said()]
        return " ".join(parts[::-1] if (self.error or 0.0) > ERROR else parts)

    def parts(self) -> list[str | Table]:
        """Return what precedes the results: the source of the step times, and recorded next to replayed times."""
        table = text_table(HEADINGS, left=1)
        for one in self.replicas:
            cells = [one.name, f"{one.requests:,}"]
            for time, _, factor in TIMES:
                cells += [cell(value, factor=factor) for value in (one.recorded[time], one.replayed[time])]
                cells.append(cell(one.error(time), "+.1%"))
            table.add_row(*cells)
        return [str(self.pool), "", *([table] if self.replicas else [])]

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "step_times": {one.name: self.pool.sources[one.calibration] for one in self.pool.replicas},
            "said": self.said(),
            "error": self.error,
            "replicas": {
                one.name: {
                    "requests": one.requests,
                    "recorded": one.recorded,
                    "replayed": one.replayed,
                    "error": {time: one.error(time) for time, *_ in TIMES},
                }
                for one in self.replicas
            },
        }

    def _errors(self, *times: str) -> list[tuple[float, str, str]]:
        return [
            (error, _NAMES[time], one.name)
            for one in self.replicas
            for time in times or _JUDGED
            if (error := one.error(time)) is not None
        ]


def past_of(pool: SimulatedPool, requests: RequestTable, seed: int = 0) -> PastReplay:
    """Replay the requests that went to replicas of the pool, each on its own replica, and compare.

    The requests that a fit has seen correct it, as steps that take too long also make more requests overlap. The
    comparison uses the other requests.
    """
    recording = _Recording(pool, requests, seed)
    best, least = pool, math.inf
    for _ in range(_CORRECTIONS if pool.is_fitted else 0):
        seen = recording.compared(pool, 0)
        error = max((abs(one.error("tpot_s") or one.error("e2e_s") or 0.0) for one in seen), default=0.0)
        if error < least:
            best, least = pool, error
        if error < _CLOSE:
            break
        pool = pool.corrected({one.name: (one.recorded, one.replayed) for one in seen})
    return PastReplay(best, tuple(recording.compared(best, 1)))


class _Recording:
    """Requests that went to replicas of a pool; if there are many, windows spread over the trace."""

    def __init__(self, pool: SimulatedPool, requests: RequestTable, seed: int) -> None:
        self._requests, self._seed = requests, seed
        outcomes = self._outcomes = requests.outcomes
        names = {(one.name, one.method.value): number for number, one in enumerate(pool.replicas)}
        went = np.array([names.get(one, -1) for one in outcomes.replicas] + [-1])
        self._sent_to = went[outcomes.replica]
        self._recorded = {"e2e_s": outcomes.e2e_s, "ttft_s": outcomes.ttft_s, "tpot_s": outcomes.tpot_s}
        chosen = np.flatnonzero((self._sent_to >= 0) & ~np.isnan(outcomes.sent_at))
        self._chosen = chosen[np.argsort(outcomes.sent_at[chosen], kind="stable")]
        self._replayed: tuple[SimulatedPool | None, dict[str, Floats]] = None, {}

    def compared(self, pool: SimulatedPool, half: int) -> list[Compared]:
        """Return each replica's means over every other request, from the first or second; over all without a fit."""
        if self._replayed[0] is not pool:
            self._replayed = pool, self._replay(pool)
        replayed, found = self._replayed[1], []
        for number, one in enumerate(pool.replicas):
            own = self._chosen[(self._sent_to[self._chosen] == number) & (self._outcomes.e2e_s[self._chosen] > 0)]
            own = own[half::2] if pool.is_fitted else own
            own = own[~np.isnan(replayed["e2e_s"][own])]
            if len(own) >= _FEW:
                means = [self._means(of, beside, own) for of, beside in permutations((self._recorded, replayed))]
                found.append(Compared(one.name, len(own), *means))
        return found

    def _replay(self, pool: SimulatedPool) -> dict[str, Floats]:
        """Return the times of the requests in a replay; NaN for the first of a window, which starts idle."""
        replayed = {time: np.full(len(self._sent_to), np.nan) for time in self._recorded}
        count, outcomes = len(self._chosen), self._outcomes
        length = count if count <= _WINDOW * _WINDOWS else _WINDOW
        for start in np.linspace(0, count - length, min(_WINDOWS, count // max(1, length))).astype(int).tolist():
            numbers = self._chosen[start : start + length]
            sent_to, table = self._sent_to[numbers].tolist(), self._requests.as_sent(numbers)
            played = replay(pool.replicas, table, None, seed=self._seed, sent_to=sent_to)
            sent_at = outcomes.sent_at[numbers][played.number]
            begun = sent_at >= sent_at[0] + (np.nanquantile(outcomes.e2e_s[numbers], 0.9) if start else 0.0)
            for time, values in replayed.items():
                values[numbers[played.number[begun]]] = getattr(played, time)[begun]
        return replayed

    def _means(self, of: Mapping[str, Floats], beside: Mapping[str, Floats], own: npt.NDArray[np.int64]) -> Means:
        """Return means over the requests for which both have a time; time per token is weighted by tokens."""
        means: dict[str, float | None] = {}
        for time, values in of.items():
            both = own[~np.isnan(values[own]) & ~np.isnan(beside[time][own])]
            weights = self._outcomes.output_tokens[both] - 1 if time == "tpot_s" else np.ones(len(both))
            means[time] = float(np.average(values[both], weights=weights)) if len(both) else None
        return means
