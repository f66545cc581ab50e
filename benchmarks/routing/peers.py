"""A greedy policy, for comparison only."""

from __future__ import annotations

from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings


class Greedy(Learned):
    """`learned`, except that each request goes where it is fastest itself: the delay of others weighs nothing."""

    name = "greedy"

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.sum._others = 0.0
