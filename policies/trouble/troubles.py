"""Troubles of kinds of requests on backends: found, priced, avoided, retried and forgotten."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import combinations
from operator import add
from typing import Final, TypeVar

from backends.backend import Candidate
from backends.speculation import Method
from policies.arm import arm_of
from policies.drafter_limits import has_room
from policies.features.request import RequestFeatures
from policies.statistics import Key, Statistics, Sums, Table
from policies.trouble.evidence import log_evidence, null_share, weights_of

C = TypeVar("C", bound=Candidate)

PROBLEMS: Final = ("failed", "stalled", "unusable")
"""The problems: an error, a pause of seconds within the answer, an unusable answer."""
TROUBLE: Final = Table("trouble_by_key", 5, 6 * 3600.0, lambda key: (key[0], key[1], "", key[3]))
"""Tries, how many had each of `PROBLEMS`, and the seconds lost; by arm, backend, shape and client id."""

_FALSE_ALARMS: Final = 0.01
"""Probability of any finding ever in a pool in which nothing fails more often than elsewhere."""
_LEAST_BAD: Final = 2.0
_LEAST_TRIES: Final = 20.0
"""Tries below which requests elsewhere say nothing by themselves."""
_MOST_FINDINGS: Final = 8
_MOST_ROWS: Final = 1000
_LEAST_ROWS: Final = 10
"""Least rows of counts used per client, those with the most requests: a client may send any number of shapes."""
_SECONDED: Final = math.log(20.0)
"""Evidence from all other clients from which a finding that one client dominates concerns everybody."""
_CANARY_S: Final = 300.0
_STILL: Final = 0.02
"""Probability of the good answers in a row, if nothing had changed, at which a finding is dropped."""
_LONGEST_S: Final = 3600.0
"""No request takes longer."""
_OLD_S: Final = 30.0
_BUSY: Final = 50.0
"""The search takes at most a fiftieth of a core."""
_BASELINE: Final = f"{Method.BASELINE.value}:0"

_KEY: Final = 4
"""Parts of a valid key; other gateways may write any."""

_Cell = tuple[str, str, tuple[str, ...]]
"""An arm, one of its backends or empty for all, and one or two features of requests; empty for all."""


@dataclass(frozen=True, slots=True)
class TroubleFinding:
    """A kind of requests that fails more often on an arm, or on one of its backends, than elsewhere."""

    arm: str
    backend: str  # empty if it concerns the whole arm
    shape: tuple[str, ...]  # what the requests have in common
    problem: str  # one of `PROBLEMS`
    bad: float
    tries: float
    lost_s: float  # mean seconds that a client wasted
    client: str = ""  # the only client that it concerns, by its own requests; empty for all

    @property
    def share(self) -> float:
        """Share of the requests that fail."""
        return self.bad / self.tries

    @property
    def place(self) -> str:
        """The backend, or the arm."""
        return self.backend or self.arm

    @property
    def name(self) -> tuple[str, str, str]:
        """Place, shape and problem: unique among findings for the same client."""
        return self.place, "+".join(self.shape), self.problem

    def concerns(self, arm: str, backend: str, shape: Sequence[str], client: str) -> bool:
        """Return whether it concerns a client's request of a shape on a backend."""
        is_there = arm == self.arm and self.backend in {"", backend} and self.client in {"", client}
        return is_there and all(each in shape for each in self.shape)

    def __str__(self) -> str:
        """Return the finding in words."""
        asked, share = " and ".join(self.shape), 100 * self.share
        whose = " of one key" if self.client else ""
        return f"{self.place}: {share:.0f}% of {self.tries:.0f} requests{whose} with {asked} {self.problem}"


class Troubles:
    """The findings about one model, and the counts behind them.

    A finding from one client's requests concerns only its own: whatever it sends, it cannot take a backend from others.
    A finding for all must hold without any single client.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from policies.features.request import Endpoint
    >>> mtp = Backend("m", "llama", Method.MTP, "http://127.0.0.1:8001", num_speculative_tokens=2)
    >>> request, troubles = RequestFeatures("llama", Endpoint.CHAT, shape=("thinking",)), Troubles()
    >>> plain = Backend("b", "llama", Method.BASELINE, "http://127.0.0.1:8002")
    >>> for number in range(42):
    ...     troubles.observe(request, mtp, "failed" if number % 6 == 0 else "", 0.8)
    ...     troubles.observe(request, plain, "", 0.0)
    >>> troubles.refresh()
    True
    >>> print(*troubles.found)
    mtp:2: 17% of 42 requests with thinking failed
    """

    def __init__(self, statistics: Statistics | None = None) -> None:
        self.statistics = Statistics((TROUBLE,), time.time) if statistics is None else statistics
        self.found: tuple[TroubleFinding, ...] = ()
        # Good answers since the last bad one, by finding and client: none can keep alive what others no longer see.
        self._good: dict[tuple[str, ...], int] = {}
        self._changed_s: dict[str, float] = {}  # when engines last changed, by backend
        self._is_due = False
        self._looked_s = self._pause_s = self._canary_s = 0.0

    def observe(
        self, request: RequestFeatures, backend: Candidate, problem: str, lost_s: float, age_s: float = 0.0
    ) -> None:
        """Count a request that a backend got `age_s` ago; `problem` is one of `PROBLEMS`, or empty.

        A request from before the engine changed says nothing about the current one.
        """
        if self._changed_s:
            now_s = self.statistics.clock()
            if now_s - age_s < self._changed_s.get(backend.name, 0.0) <= now_s:  # else the clock was set back
                return
        arm, shape, bad = arm_of(backend), request.shape, tuple([float(problem == each) for each in PROBLEMS])
        key = arm, backend.name, "+".join(shape), request.client
        self.statistics.add(TROUBLE, key, 1.0, *bad, lost_s if problem else 0.0)
        self._is_due |= bool(problem)
        for found in self.found:
            if found.concerns(arm, backend.name, shape, request.client):
                name = *found.name, found.client, request.client
                good = self._good[name] = 0 if problem == found.problem else self._good.get(name, 0) + 1
                if good >= math.log(_STILL) / math.log(max(1e-9, 1.0 - found.share)):
                    self._good.clear()
                    self._drop(found.arm, found.backend, found.shape, found.client)

    def forget(self, backend: str) -> None:
        """Drop the counts of a backend, whose engine has changed."""
        now_s = self.statistics.clock()
        self._changed_s = {name: at_s for name, at_s in self._changed_s.items() if at_s > now_s - _LONGEST_S}
        self._changed_s[backend] = now_s
        self._drop("", backend, ())

    def refresh(self) -> bool:
        """Search for troubles if that is due; return whether the findings have changed."""
        now_s, began_s = self.statistics.clock(), time.perf_counter()
        pause_s = max(self._pause_s, 0.0 if self._is_due else _OLD_S)
        if 0.0 <= now_s - self._looked_s < pause_s:  # else it is due, or the clock was set back
            return False
        self._is_due, self._looked_s = False, now_s  # first: counts that arrive meanwhile are due again
        buckets = self.statistics.buckets(TROUBLE)
        found = tuple(_find(buckets)) if buckets else ()
        self._pause_s = _BUSY * (time.perf_counter() - began_s)
        before, self.found = self.found, found
        if {(each.name, each.client) for each in before} == {(each.name, each.client) for each in found}:
            return False
        self._good.clear()
        return True

    def at(self, backend: Candidate) -> list[TroubleFinding]:
        """Return the findings that concern a backend."""
        return [each for each in self.found if each.arm == arm_of(backend) and each.backend in {"", backend.name}]

    def risk(self, request: RequestFeatures, backend: Candidate) -> TroubleFinding | None:
        """Return the likeliest trouble of a request on a backend; None if none is known."""
        arm, shape, client = arm_of(backend), request.shape, request.client
        found = [each for each in self.found if each.concerns(arm, backend.name, shape, client)]
        return max(found, key=lambda each: each.share, default=None)

    def price(
        self, request: RequestFeatures, candidates: Sequence[Candidate], costs: list[float], *, is_sent: bool
    ) -> None:
        """Add the expected loss of a request to the costs in seconds: the wasted wait, and another try.

        Every few minutes, one request is exempt, to find out whether all is well again.
        """
        risks = [self.risk(request, candidate) for candidate in candidates] if request.shape else []
        if not any(risks) or (is_sent and self._is_canary()):
            return
        again_s = min(costs)
        for index, risk in enumerate(risks):
            if risk is not None:
                costs[index] += risk.share * (risk.lost_s + again_s)

    def sparing(self, request: RequestFeatures, candidates: Sequence[C], *, is_sent: bool = True) -> Sequence[C]:
        """Return the candidates without known trouble for a request, unless they are overloaded."""
        if not request.shape:
            return candidates
        safe = [each for each in candidates if self.risk(request, each) is None]
        if not safe or len(safe) == len(candidates) or not has_room(safe, candidates):
            return candidates
        return candidates if is_sent and self._is_canary() else safe

    def _is_canary(self) -> bool:
        now_s = self.statistics.clock()
        if 0.0 < self._canary_s - now_s <= _CANARY_S:  # else it is due, or the clock was set back
            return False
        is_first, self._canary_s = not self._canary_s, now_s + _CANARY_S
        return not is_first

    def _drop(self, arm: str, backend: str, shape: Iterable[str], client: str = "") -> None:
        def matches(key: Key) -> bool:
            is_there = arm in {"", key[0]} and backend in {"", key[1]} and client in {"", key[3]}
            return is_there and set(shape) <= set(key[2].split("+"))

        self.statistics.drop(TROUBLE, matches)
        self._is_due = True


_Row = tuple[Key, Sums]


def _find(buckets: dict[Key, Sums]) -> Iterator[TroubleFinding]:
    """Yield the troubles of all requests, and then other ones of each client's."""
    by_client: dict[str, list[_Row]] = {}
    for key, sums in buckets.items():
        if len(key) == _KEY and min(sums) >= 0.0:
            by_client.setdefault(key[3], []).append((key, sums))
    most = max(_LEAST_ROWS, _MOST_ROWS // max(1, len(by_client)))
    own = {client: nlargest(most, rows, key=lambda row: row[1][0]) for client, rows in by_client.items()}
    for index in range(1, len(PROBLEMS) + 1):
        found = [*_strongest_first([row for rows in own.values() for row in rows], index, len(own), is_shared=True)]
        yield from found
        for client, rows in own.items():
            for each in _strongest_first(_unexplained(rows, found), index, len(own), is_shared=False):
                yield replace(each, client=client)


def _strongest_first(rows: list[_Row], index: int, clients: int, *, is_shared: bool) -> Iterator[TroubleFinding]:
    """Yield troubles, strongest evidence first; what one finding explains does not count for another."""
    for _ in range(_MOST_FINDINGS):
        is_enough = sum(sums[index] for _, sums in rows) >= _LEAST_BAD
        found = _strongest(rows, index, clients, is_shared=is_shared) if is_enough else None
        if found is None:
            break
        yield found
        rows = _unexplained(rows, [found])


def _unexplained(rows: list[_Row], found: Sequence[TroubleFinding]) -> list[_Row]:
    """Return the rows that no finding concerns."""
    return [
        (key, sums)
        for key, sums in rows
        if not any(each.concerns(key[0], key[1], key[2].split("+"), key[3]) for each in found)
    ]


_Totals = dict[_Cell, list[float]]
"""Tries, how many had a problem, the seconds lost, and how many had any, by cell."""


def _strongest(rows: Iterable[_Row], index: int, clients: int, *, is_shared: bool) -> TroubleFinding | None:
    """Return the cell with the strongest evidence for a problem, if it is strong enough; else None.

    For shared rows, the evidence must hold without any single client.
    """
    of_clients: dict[str, _Totals] = {}
    for (arm, backend, shape, client), sums in rows:
        totals, asked = of_clients.setdefault(client, {}), shape.split("+") if shape else []
        for where in (("", ""), (arm, ""), (arm, backend)):
            for features in ((), *[(each,) for each in asked], *combinations(asked, 2)):
                total = totals.setdefault((*where, features), [0.0, 0.0, 0.0, 0.0])
                for place, number in enumerate((sums[0], sums[index], sums[4], sum(sums[1:4]))):
                    total[place] += number
    cells = _added(of_clients.values())
    # The only backend of an arm is the arm.
    tested = [
        cell for cell in cells if cell[2] and cell[0] and not (cell[1] and cells[cell] == cells[cell[0], "", cell[2]])
    ]
    best, evidence = None, math.log(max(1, len(tested)) * (1 + clients) * len(PROBLEMS) / _FALSE_ALARMS)
    # Among cells with equal evidence, the more general one comes first: an arm, one feature.
    for cell in sorted(tested, key=lambda cell: (bool(cell[1]), len(cell[2]))):
        tries, bad, lost_s, all_bad = cells[cell]
        if bad < _LEAST_BAD:
            continue
        if is_shared:
            own = {client: totals[cell] for client, totals in of_clients.items() if cell in totals}
            weights = weights_of({client: total[0] for client, total in own.items()})
            tries, bad = (sum(weights[client] * total[place] for client, total in own.items()) for place in (0, 1))
        found_here = log_evidence(bad, tries, _null(cells, cell))
        if found_here > evidence + 1e-9 and not (is_shared and _is_of_one(of_clients, cell)):
            best = TroubleFinding(*cell, PROBLEMS[index - 1], bad, tries, lost_s / all_bad)
            evidence = found_here
    return best


def _is_of_one(of_clients: dict[str, _Totals], cell: _Cell) -> bool:
    """Return whether the evidence of a cell depends on a single client."""
    for client, own in of_clients.items():
        if own.get(cell, (0.0, 0.0))[1]:
            cells = _added([totals for other, totals in of_clients.items() if other != client])
            tries, bad = cells.get(cell, (0.0, 0.0))[:2]
            if not tries or log_evidence(bad, tries, _null(cells, cell)) < _SECONDED:
                return True
    return False


def _added(parts: Iterable[_Totals]) -> _Totals:
    """Return the sums of totals."""
    cells: _Totals = {}
    for totals in parts:
        for cell, total in totals.items():
            cells[cell] = list(map(add, cells[cell], total)) if cell in cells else total
    return cells


def _null(cells: _Totals, cell: _Cell) -> float:
    """Return the share that fails anyway: of such requests elsewhere, and of other requests here."""
    (arm, backend, shape), (tries, bad, _, _) = cell, cells[cell]
    everywhere, baseline = cells["", "", shape], cells.get((_BASELINE, "", shape))
    elsewhere = null_share(everywhere[1] - bad, everywhere[0] - tries)
    if baseline is not None and arm != _BASELINE and baseline[0] >= _LEAST_TRIES:
        elsewhere = null_share(baseline[1], baseline[0])
    others = cells[arm, backend, ()]
    if others[0] - tries < _LEAST_TRIES:
        return elsewhere
    return max(elsewhere, null_share(others[1] - bad, others[0] - tries))
