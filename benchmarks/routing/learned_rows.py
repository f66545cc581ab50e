"""What a policy has learned, as rows that another one of its kind can begin with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.policy import Policy
from policies.roles import Clocked, Stateful
from policies.statistics import Key, Row, Statistics, Sums


def learned_rows(policy: Policy) -> list[Row]:
    """Return the learned statistics of a policy; empty for one that does not learn."""
    if not isinstance(policy, Stateful):
        return []
    statistics = policy.statistics
    return [
        Row(table.name, 0, key, sums)
        for table in statistics.tables.values()
        for key, sums in statistics.buckets(table).items()
    ]


def set_others(statistics: Statistics, rows: Iterable[Row]) -> None:
    """Set what other gateways have learned."""
    others: dict[tuple[str, int], dict[Key, Sums]] = {}
    for row in rows:
        others.setdefault((row.table, row.epoch), {})[row.key] = row.sums
    for (table, epoch), buckets in others.items():
        statistics.set_others_of(table, epoch, buckets)


def set_learned(policy: Policy, rows: Sequence[Row], now_s: float) -> None:
    """Set the learned statistics of a policy, as if they had been observed at `now_s`."""
    if not isinstance(policy, Stateful):
        return
    statistics = policy.statistics
    if isinstance(policy, Clocked):
        policy.set_clock(lambda: now_s)
    epochs = {table.name: int(now_s // table.epoch_s) for table in statistics.tables.values()}
    set_others(statistics, (row._replace(epoch=epochs[row.table]) for row in rows if row.table in epochs))
