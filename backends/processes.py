"""The engine processes that answer at one address: one, the next one after a restart, or several in turn."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from backends.engine_metrics import EngineMetrics, total

_GONE_S: Final = 300.0
"""Seconds after which a process that has not answered is gone."""
_FALLS: Final = 3
_FALLS_S: Final = 30.0
"""As often, and within so many seconds, no engine restarts."""
SEVERAL: Final = "several engines answer at this address; give each its own"


class Processes:
    """The processes behind the metrics pages of one address, by the time at which they started.

    Examples
    --------
    >>> processes, one, two = Processes(), EngineMetrics(started_s=1.0), EngineMetrics(started_s=2.0)
    >>> [processes.take(page, now_s=0.0)[1] for page in (one, two, one, two)], processes.are_several
    ([None, True, False, False], True)
    """

    def __init__(self) -> None:
        self.are_several = False
        self._pages: dict[float, tuple[EngineMetrics, float]] = {}  # the last one of each, and when it was read
        self._last: EngineMetrics | None = None
        self._falls: deque[float] = deque(maxlen=_FALLS)
        self._twins_s = -math.inf  # when two of one start were last seen

    def take(self, page: EngineMetrics, now_s: float) -> tuple[EngineMetrics | None, bool | None]:
        """Return what all that answer have counted, and whether there is another process than before.

        The first is None if they cannot be told apart, the second if the page does not tell.
        """
        last, self._last = self._last, page
        has_fallen = last is not None and (
            page.generation_tokens < last.generation_tokens or page.prompt_tokens < last.prompt_tokens
        )
        if not page.started_s:
            if has_fallen:
                self._falls.append(now_s)
            self.are_several = len(self._falls) == _FALLS and now_s - self._falls[0] < _FALLS_S
            return (None, False) if self.are_several else (page, has_fallen or None)
        is_other = last is not None and page.started_s != last.started_s
        if has_fallen and not is_other:  # a restart would have another start: two of one start, as of one script
            self._twins_s = now_s
        if now_s - self._twins_s < _GONE_S:
            self.are_several = True
            return None, False
        pages = self._pages = {start: each for start, each in self._pages.items() if now_s - each[1] < _GONE_S}
        was_several, returns = self.are_several, is_other and page.started_s in pages
        pages[page.started_s] = page, now_s
        self.are_several = returns or (was_several and len(pages) > 1)
        if self.are_several:
            return total([each for each, _ in pages.values()]), False
        return page, None if last is None or not last.started_s else is_other
