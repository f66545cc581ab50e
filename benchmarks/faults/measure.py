"""One fault on one system: what its clients lose, and what is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.faults.injections import Injection
from benchmarks.faults.load import ANSWERED, LEFT, SILENT, Load, mixed
from benchmarks.faults.replicas import last_end_s
from benchmarks.faults.stage import Stage, until
from benchmarks.table import head, row

_BEFORE_S, _AFTER_S, _RECOVERY_S, _IDLE_S = 1.5, 1.0, 20.0, 10.0


@dataclass(slots=True)
class Result:
    """What a fault did.

    Parameters
    ----------
    sent, answered, left
        Requests: all, those with their whole answer, and those whose client left on purpose.
    failed
        The others, by reason.
    examples
        An error of each reason.
    sent_twice, run_twice
        Requests that replicas have begun, or answered to their end, more than once.
    longest_s
        Longest time to an answer, slow clients left out.
    failing_s
        From the first to the last failure.
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
    rss_before_mb: float
    sent: int = 0
    answered: int = 0
    left: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    sent_twice: int = 0
    run_twice: int = 0
    longest_s: float = 0.0
    failing_s: float = 0.0
    back_s: float | None = None
    idle_s: float | None = None
    rss_after_mb: float = 0.0
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

    @property
    def losses(self) -> str:
        """Return how many requests failed, by reason; failures that look like an answer are in bold."""
        found = [] if self.is_alive else ["**died**"]
        found += [f"**{n} {what}**" if what in SILENT else f"{n} {what}" for what, n in sorted(self.failed.items())]
        return ", ".join(found) or "0"


async def measure(stage: Stage, injection: Injection, seconds: float, rate_per_s: float, seed: int) -> Result:
    """Inject a fault under load, and return what it did."""
    result = Result(stage.system.name, injection.name, stage.rss_mb())
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
    if result.is_alive:
        result.idle_s = await stage.until_idle(_IDLE_S)
        result.rss_after_mb = stage.rss_mb()
    ids, journal = {outcome.ask.work.request_id for outcome in tally.outcomes}, stage.replicas.journal()
    result.sent, result.answered, result.left = load.sent, tally.count(ANSWERED), tally.count(LEFT)
    result.failed, result.examples = dict(tally.failures()), tally.examples()
    result.sent_twice = len(ids.intersection(journal.sent_twice()))
    result.run_twice = len(ids.intersection(journal.run_twice()))
    result.lag_s = load.lag_s
    result.longest_s, result.failing_s = tally.longest_s(), tally.failing_s()
    return result


def peers_table(results: Sequence[Result]) -> str:
    """Return what each system lost: a row a fault, a column a system."""
    losses = {(result.fault, result.system): result.losses for result in results}
    systems = list(dict.fromkeys(result.system for result in results))
    lines = [head("fault", *systems)]
    lines += [
        row(fault, *(losses.get((fault, system), "") for system in systems))
        for fault in dict.fromkeys(result.fault for result in results)
    ]
    totals = [[result for result in results if result.system == system] for system in systems]
    sums = [f"{sum(each.lost for each in own)} of {sum(each.sent for each in own)}" for own in totals]
    silent = [f"{sum(each.silent for each in own)}" for own in totals]
    return "\n".join([*lines, row("**lost in all**", *sums), row("**of these unnoticed**", *silent)])


OWN_HEAD = (
    "fault", "sent", "answered", "left", "failed", "sent twice", "run twice", "longest answer", "failures over",
    "replica back after", "idle after", "MB before → after", "orphans",
)  # fmt: skip


def own_row(each: Result) -> str:
    """Return all figures of a fault."""
    cells = [
        f"{each.fault}, {each.system}", each.sent, each.answered, each.left, each.losses,
        each.sent_twice, each.run_twice, f"{each.longest_s:.1f} s", f"{each.failing_s:.1f} s",
        "never" if each.back_s is None else f"{each.back_s:.1f} s",
        "**never**" if each.idle_s is None else f"{each.idle_s:.1f} s",
        f"{each.rss_before_mb:.0f} → {each.rss_after_mb:.0f}", each.orphans,
    ]  # fmt: skip
    return row(*cells)
