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


def teach(policy: Learned, learning: Learning) -> None:
    """Load what another policy has learned into a policy, as if other gateways had just observed it."""
    policy.set_clock(lambda: 0.0)
    for name in policy.statistics.tables:
        policy.statistics.set_others_of(name, 0, learning[name])
