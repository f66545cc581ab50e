"""The past of all backends: a few numbers of each, every few seconds, for half an hour."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gateway.dashboard.document import FORMAT, SERIES, BackendHistory, History
from gateway.dashboard.recent import POINT_S

POINTS = 360
"""Points kept; with `POINT_S` half an hour."""

_Key = tuple[str, str]


class Past:
    """The past of all backends, with a bound on its memory: 20 kB for each.

    Examples
    --------
    >>> past = Past()
    >>> past.add(1.0, {("llama", "a"): [2.0] * len(SERIES)})
    >>> past.document().backends[0].values[0]
    array([2.], dtype=float32)
    """

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._rings: dict[_Key, npt.NDArray[np.float32]] = {}  # one column a point, the newest last

    def add(self, at_s: float, points: dict[_Key, list[float | None]]) -> None:
        """Add a point of each backend that there is; those that are gone are forgotten."""
        self._at_s = [*self._at_s, at_s][-POINTS:]
        self._rings = {key: self._rings.get(key, _EMPTY) for key in points}
        for key, point in points.items():
            shifted = np.roll(self._rings[key], -1, axis=1)
            shifted[:, -1] = np.array(point, np.float32)  # None becomes NaN
            self._rings[key] = shifted

    def document(self) -> History:
        """Return the event `history`."""
        count = len(self._at_s)
        backends = [
            BackendHistory(model, backend, np.ascontiguousarray(ring[:, POINTS - count :]))
            for (model, backend), ring in self._rings.items()
        ]
        return History(FORMAT, SERIES, POINT_S, self._at_s, backends)


_EMPTY = np.full((len(SERIES), POINTS), np.nan, np.float32)
