"""What may be set of learning itself. Apart from what goes by it, which can be compiled so."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Objective(StrEnum):
    """What counts: everybody's time to finish, to the first token, per token, or promises kept."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    GOODPUT = "goodput"


class Exploration(BaseModel):
    """How much is spent on learning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(
        default=0.003, ge=0, le=0.5, description="Most that exploring may add to a request's expected cost, as a share."
    )
    most: float = Field(
        default=0.05, ge=0, le=1, description="Largest probability with which a request is used to explore."
    )


class GuardrailSettings(BaseModel):
    """How the comparison is made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(default=0.01, ge=0, lt=1, description="Share of requests that go by `least_loaded`; 0: none.")
    confidence: float = Field(default=0.99, gt=0.5, lt=1, description="That learned is worse, to freeze it.")
    tolerance: float = Field(default=0.02, ge=0, description="By how much it may be slower before it counts as worse.")
