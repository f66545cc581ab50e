"""One fault on one system: what its clients lose, and what is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.faults.injections import Injection
from benchmarks.faults.load import SILENT, Load, mixed
from benchmarks.faults.replicas import last_end_s
from benchmarks.faults.stage import Stage, until
from benchmarks.table import head, row

_BEFORE_S, _AFTER_S, _RECOVERY_S, _IDLE_S = 1.5, 1.0, 20.0, 10.0
_OF_THE_SYSTEM = {"system-kill", "system-restart"}


@dataclass(slots=True)
class Result:
    """What a fault did.

    Parameters
    ----------
    failed
        Failed requests, by reason.
    run_twice
        Requests that replicas have answered to their end more than once.
    back_s
        From the end of the fault until the replica that had it answered a request; None if it did not in time.
    idle_s
        From the last outcome until nothing was in flight, as the replicas (and the gateway) count; None if that took
        too long.
    orphans
        Processes that the system left behind.
    lag_s
        The longest time by which a request was sent too late: the machine was busy.
    """

    system: str
    fault: str
    sent: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    run_twice: int = 0
    back_s: float | None = None
    idle_s: float | None = None
    orphans: int = 0
    lag_s: float = 0.0
    is_alive: bool = True

    @property
    def lost(self) -> int:
        """Return the number of failed requests."""
        return sum(self.failed.values())

    @property
    def silent(self) -> int:
        """Return the number of failures that looked like answers."""
        return sum(count for what, count in self.failed.items() if what in SILENT)


async def measure(stage: Stage, injection: Injection, seconds: float, rate_per_s: float, seed: int) -> Result:
    """Inject a fault under load, and return what it did."""
    result = Result(stage.system.name, injection.name)
    load = Load(stage.port)
    async with load.steady(mixed(seed), rate_per_s):
        await asyncio.sleep(_BEFORE_S)
        async with injection.inject(stage):
            await asyncio.sleep(max(seconds, injection.seconds))
        ended_s = time.monotonic()
        if await until(lambda: last_end_s(stage.victim) >= ended_s, _RECOVERY_S):
            result.back_s = time.monotonic() - ended_s
        await asyncio.sleep(_AFTER_S)
    tally = await load.finish()
    result.is_alive = stage.is_alive()
    result.idle_s = await stage.until_idle(_IDLE_S) if result.is_alive else None
    ids = {outcome.ask.work.request_id for outcome in tally.outcomes}
    result.sent, result.failed = load.sent, dict(tally.failures())
    result.run_twice = len(ids.intersection(stage.replicas.journal().run_twice()))
    result.lag_s = load.lag_s
    return result


HEAD = head("fault", "sent", "failed", "run twice", "replica back after", "idle after", "orphans", "lag")


def fault_row(each: Result) -> str:
    """Return the figures of a fault; failures that look like an answer are in bold."""
    failed = [] if each.is_alive else ["**died**"]
    failed += [f"**{n} {what}**" if what in SILENT else f"{n} {what}" for what, n in sorted(each.failed.items())]
    times = ("never" if seconds is None else f"{seconds:.1f} s" for seconds in (each.back_s, each.idle_s))
    cells = each.sent, ", ".join(failed) or "0", each.run_twice, *times, each.orphans, f"{each.lag_s:.2f} s"
    return row(f"{each.fault}, {each.system}", *cells)


def sums(results: Sequence[Result]) -> str:
    """Return what each system lost: a column a system."""
    of_system = {each.system: [one for one in results if one.system == each.system] for each in results}
    lost = [f"{sum(one.lost for one in own)} of {sum(one.sent for one in own)}" for own in of_system.values()]
    ended = [sum(one.lost for one in own if one.fault in _OF_THE_SYSTEM) for own in of_system.values()]
    silent = [sum(one.silent for one in own) for own in of_system.values()]
    return "\n".join(
        [
            head("", *of_system),
            row("**lost in all**", *lost),
            row("of these while the system itself was killed or restarted", *ended),
            row("**of these unnoticed**", *silent),
        ]
    )
