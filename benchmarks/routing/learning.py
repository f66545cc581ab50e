"""What `learned` has learned, for another one to begin with."""

from __future__ import annotations

from collections.abc import Mapping

from policies.learned.policy import Learned
from policies.statistics import Key, Sums

Learning = Mapping[str, Mapping[Key, Sums]]
"""Sums by table and key."""


def learning_of(policy: Learned) -> Learning:
    """Return what a policy has learned."""
    statistics = policy.statistics
    return {name: statistics.buckets(table) for name, table in statistics.tables.items()}


def teach(policy: Learned, learning: Learning, now_s: float = 0.0) -> None:
    """Load what another policy has learned into a policy, as if other gateways had observed it at `now_s`."""
    policy.set_clock(lambda: now_s)
    for name, table in policy.statistics.tables.items():
        policy.statistics.set_others_of(name, int(now_s // table.epoch_s), learning[name])
