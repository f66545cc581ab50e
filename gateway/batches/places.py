"""How many lines run on one replica: as many as leave the requests of others alone, and as are likely to end.

One line has the kept place: it is not given up when a request comes. The others are, so one is begun only if it will
probably end before the next request, and if what has been answered pays for those that may be given up.
"""

from __future__ import annotations

import math
from typing import Final

from gateway.batches.lines import Line

_DOUBLES_S: Final = 0.25
_EARNS: Final = 0.09
"""Lines that may be given up, for each that is answered: at most 1.09 runs for an answer in the long run."""
_SAVES: Final = 2.0
"""What may be saved up, over the most lines of a replica."""
_LIKELY: Final = 0.5
"""Risk above which no line is begun that might be given up."""
_LONG: Final = 9.0
"""Times that a line takes after which a replica counts as alone for long: then the risk is about a tenth."""
_UNKNOWN_S, _UNKNOWN = 5.0, 16
"""Until a line has been answered, so many are tried on a replica that has been alone for so long."""
_PER_DOUBLING: Final = 4
_LEAST_S: Final = 0.05
_STEPS: Final = 21 * _PER_DOUBLING  # up to a day
_MOST_SEEN: Final = 16.0


def places_of(alone_s: float, most: int) -> int:
    """Return how many lines may run on a replica that has had no requests of others for so many seconds.

    Examples
    --------
    >>> [places_of(alone_s, 32) for alone_s in (0.0, 0.3, 1.0, 9.0)]
    [1, 2, 16, 32]
    """
    return min(most, int(2 ** min(30.0, alone_s / _DOUBLES_S)))


class Pauses:
    """How long a replica has usually no requests of others: by length, how often a pause that lasted so long ended.

    What has not been seen is taken to be as likely to last twice as long as not.

    Examples
    --------
    >>> pauses = Pauses()
    >>> round(pauses.risk(2.0, 2.0), 2)
    0.5
    >>> for _ in range(9):
    ...     pauses.end(10.0)
    >>> round(pauses.risk(2.0, 2.0), 2), round(pauses.risk(9.0, 9.0), 2)
    (0.06, 0.95)
    """

    def __init__(self) -> None:
        self._ends = [1.0 - 2.0 ** (-1.0 / _PER_DOUBLING)] * _STEPS
        self._seen = [1.0] * _STEPS

    def end(self, pause_s: float) -> None:
        """Learn from a pause that has ended."""
        last = int(_step(pause_s))
        for step in range(last + 1):
            self._seen[step] = min(_MOST_SEEN, self._seen[step] + 1.0)
            self._ends[step] += ((step == last) - self._ends[step]) / self._seen[step]

    def risk(self, alone_s: float, takes_s: float) -> float:
        """Return how likely it is that a pause which has lasted for so long ends within so many seconds."""
        begin, end, lasts = _step(alone_s), _step(alone_s + takes_s), 1.0
        for step in range(int(begin), int(end) + 1):
            lasts *= (1.0 - self._ends[step]) ** (min(end, step + 1.0) - max(begin, float(step)))
        return 1.0 - lasts


def _step(seconds: float) -> float:
    return min(_STEPS - 1.0, _PER_DOUBLING * math.log2(max(seconds, _LEAST_S) / _LEAST_S))


class Places:
    """The places of lines on one replica; all times are those of one clock."""

    def __init__(self, most: int, now_s: float) -> None:
        self._most = most
        self._pauses = Pauses()
        self._since_s = now_s  # since when there has been no request of others
        self._is_shared = True
        self._saved = 0.0  # lines that may be given up
        self._answered = 0  # lines, since there has been no request
        self._mean_s = self._spread_s = 0.0  # what a line takes, as TCP expects the time of an answer
        self.lines: dict[Line, None] = {}  # in flight, the oldest first
        self.waiting = 0  # requests that wait in the engine

    def look(self, now_s: float, *, is_shared: bool, has_come: bool) -> list[Line]:
        """Note whether there are requests of others, or some have come and gone; return the lines to be given up."""
        if is_shared or has_come:
            if has_come or not self._is_shared:
                self._pauses.end(now_s - self._since_s)
            self._since_s, self._answered = now_s, 0
        self._is_shared = is_shared
        if not is_shared or len(self.lines) < 2:
            return []
        kept = next((line for line in self.lines if line.must_end), next(iter(self.lines)))
        return [line for line in self.lines if line is not kept]

    def may_begin(self, now_s: float, line: Line, unsent: int = 0) -> bool:
        """Return whether a line may be sent to the replica, besides some that are yet to be sent to one."""
        count, alone_s = len(self.lines) + unsent, now_s - self._since_s
        if self.waiting or (line.must_end and any(each.must_end for each in self.lines)):
            return False
        if not count:
            return True
        if self._is_shared or count >= places_of(alone_s, self._most):
            return False
        takes_s = self._mean_s + 2.0 * self._spread_s
        if not takes_s:
            return alone_s > _UNKNOWN_S and count < _UNKNOWN
        risk = self._pauses.risk(alone_s, takes_s)
        is_long = alone_s > _LONG * takes_s and risk < 1.0 / _LONG
        return (count <= self._saved and risk < _LIKELY) or (is_long and count <= self._answered)

    def end(self, line: Line) -> None:
        """Release the place of a line."""
        self.lines.pop(line, None)

    def answered(self, took_s: float) -> None:
        """Count a line that was answered, and what it took."""
        error_s = took_s - self._mean_s
        if not self._mean_s:
            self._mean_s, self._spread_s = took_s, took_s / 2.0
        else:
            self._mean_s += error_s / 8.0
            self._spread_s += (abs(error_s) - self._spread_s) / 4.0
        self._answered += 1
        self._saved = min(_SAVES * self._most, self._saved + _EARNS)

    def gave_up(self) -> None:
        """Count a line that was given up."""
        self._saved -= 1.0
