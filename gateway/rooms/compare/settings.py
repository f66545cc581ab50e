"""The section `compare` of a model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.config.settings.base import Seconds, Section, Settings


class ComparisonSettings(Settings):
    """What to compare, and for how long.

    Parameters
    ----------
    a
        Replicas of the first arm: names (`b*` for several), a method, or a source of `discover`, with commas between
        them.
    b
        Replicas of the second arm.
    depths
        In place of a and b: numbers of drafted tokens, among which replicas with `draft_depth` change.
    policies
        In place of a and b: policies that choose in turns, including the current one.
    for_s
        Seconds until it ends without a result; null: until it is stopped.
    until
        Relative difference that does not matter: it ends once the arms differ by less.
    block_s
        Seconds of a block of time, at least eight times the mean time of a request. Null: ten times that, and 10 s at
        least; longer ones if that is too short, has too few requests, or more than are kept: 85 s for a day.
    explore
        By how much more an arm gets in some blocks, which shows other loads.
    whole
        Whether it takes all of `for_s`, even if the better arm is known, to see quiet and busy hours.
    usual
        Whether the pool serves as usual in one block of six, which shows the cost of comparing.
    """

    a: str = ""
    b: str = ""
    depths: list[Annotated[int, Field(ge=0, le=64)]] = Field(default=[], max_length=8)
    policies: list[str] = Field(default=[], max_length=8)
    for_s: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = 7200.0
    until: Annotated[float, Field(ge=0, lt=1)] = 0.02
    block_s: Annotated[float, Field(ge=1, le=3600)] | None = None
    explore: Annotated[float, Field(ge=0, le=1)] = 0.25
    whole: bool = False
    usual: bool = True

    @property
    def is_open(self) -> bool:
        """Whether it does not say what to compare."""
        return not (self.a or self.b or self.depths or self.policies)


class CompareSettings(ComparisonSettings, Section):
    """Comparisons of ways of serving that begin by themselves: docs/compare.md.

    Without `a`, `b`, `depths` and `policies`, two methods of the pool are compared at a time, those compared longest
    ago.

    Parameters
    ----------
    every_s
        Seconds from the start of one to that of the next.
    """

    key = "compare"
    of_model = True

    every_s: Seconds = 86_400.0
