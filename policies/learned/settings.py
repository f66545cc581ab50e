"""Settings of the `learned` policy, kept apart from the modules that use them so that mypyc can compile those."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from backends.validation import CheckedModel


class Objective(StrEnum):
    """What is minimised: total delay, TTFT, TPOT, or (`goodput`) missed SLOs."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    GOODPUT = "goodput"


class Exploration(CheckedModel):
    """Limits of exploration."""

    share: float = Field(
        default=0.003, ge=0, le=0.5, description="Maximum relative increase of a request's expected cost."
    )
    most: float = Field(default=0.05, ge=0, le=1, description="Maximum probability of exploring with a request.")
