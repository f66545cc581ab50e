"""Blocks of time for a guardrail, without waiting for them."""

from __future__ import annotations

import time

from policies.guarded.guardrail import Guardrail


def play_blocks(guardrail: Guardrail, ratio: float, hours: float = 24.0) -> None:
    """Play what the last hours would have been if the policy took `ratio` times as long, until it freezes or thaws."""
    was_frozen = guardrail.frozen
    end_s = time.time()
    now_s = end_s - 3600.0 * hours
    number = 0
    while now_s < end_s and guardrail.frozen == was_frozen:
        slow = 1.0 if guardrail.by_control(now_s) else ratio
        guardrail.observe(now_s, slow * (1.0 + 0.01 * (number % 7)), 100.0, "")
        number += 1
        now_s += 2.0
