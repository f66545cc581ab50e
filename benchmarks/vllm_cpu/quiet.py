"""CPU use of other processes: Linux's count of busy time less that of this process and its descendants."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import cpu_s, tree

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Clock:
    """CPU seconds so far: of the whole machine, and of this process and its descendants."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> Clock:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        busy_s = (user + nice + system + irq + softirq + steal) * _TICK_S
        return cls(time.perf_counter(), busy_s, cpu_s(tree(os.getpid()), waited=True))

    def foreign_share(self, later: Clock) -> float:
        """Return the CPU time of other processes until `later`, in shares of one core (with two cores at most 2)."""
        return max(0.0, (later.all_s - self.all_s) - (later.own_s - self.own_s)) / (later.at_s - self.at_s)


async def until_quiet(below: float, longest_s: float) -> None:
    """Wait for a second with less CPU use by other processes than `below`, for at most `longest_s` seconds."""
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        before = Clock.now()
        await asyncio.sleep(_LOOK_S)
        if before.foreign_share(Clock.now()) < below:
            return


async def until_load_below(below: float, longest_s: float) -> float:
    """Wait until the one-minute load average is below `below`, for at most `longest_s` seconds; return it."""
    end_s = time.monotonic() + longest_s
    while os.getloadavg()[0] >= below and time.monotonic() < end_s:  # noqa: ASYNC110 -- the machine's load has no event
        await asyncio.sleep(_LOOK_S)
    return os.getloadavg()[0]


def run_in_real_time() -> bool:
    """Set real-time priority for this process, not for its children; return whether that was allowed.

    When engine and generator shared two cores, Linux left chunks unread for up to a fifth of a second.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True
