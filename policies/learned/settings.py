"""Settings of the `learned` policy, kept apart from the modules that use them so that mypyc can compile those."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Objective(StrEnum):
    """What is minimised: total delay, TTFT, TPOT, or (`goodput`) missed SLOs."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    GOODPUT = "goodput"


class Exploration(BaseModel):
    """Limits of exploration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(
        default=0.003, ge=0, le=0.5, description="Maximum relative increase of a request's expected cost."
    )
    most: float = Field(default=0.05, ge=0, le=1, description="Maximum probability of exploring with a request.")


class GuardrailSettings(BaseModel):
    """Settings of the comparison with `least_loaded`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(
        default=0.01, ge=0, lt=1, description="Share of requests for which `least_loaded` decides; 0: no comparison."
    )
    confidence: float = Field(
        default=0.99, gt=0.5, lt=1, description="Confidence that the learned policy is worse at which it is frozen."
    )
    tolerance: float = Field(
        default=0.02, ge=0, description="Relative slowdown against `least_loaded` that is tolerated."
    )
