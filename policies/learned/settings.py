"""Settings of the policies that predict, kept apart from the modules that use them so that mypyc can compile those."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, field_validator

from backends.calibration.load import load_calibration
from backends.validation import CheckedModel
from policies.learned.prior import DEFAULT_CALIBRATION
from policies.learned.shadow_drafting import ShadowSettings
from policies.load_policy import LoadSettings
from policies.policy import GuardrailSettings, PolicySettings


class Objective(StrEnum):
    """What to minimize: total delay, TTFT, TPOT, or (`goodput`) missed SLOs."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    GOODPUT = "goodput"


class Slo(CheckedModel):
    """The SLO of requests for which neither the client nor its key sets one."""

    ttft_ms: float | None = Field(default=None, gt=0, description="Milliseconds to the first token.")
    tpot_ms: float | None = Field(default=None, gt=0, description="Milliseconds per output token after the first.")

    @property
    def seconds(self) -> tuple[float | None, float | None]:
        """Seconds to the first token, and per output token."""
        return _seconds(self.ttft_ms), _seconds(self.tpot_ms)


class LearnedSettings(LoadSettings):
    """The objective of a policy that predicts, and what is taken to be so until answers tell."""

    objective: Objective = Field(
        default=Objective.LATENCY,
        description="What is optimised: `latency` (the total delay of all requests), `ttft`, `tpot`, or `goodput` "
        "(the share of requests that meet their SLO).",
    )
    slo: Slo = Field(default=Slo(), description=Slo.__doc__)
    calibration: str = Field(
        default=DEFAULT_CALIBRATION,
        description="Calibration that predicts backends without observations: a name, or the path of a YAML file, as "
        "for `simulate`. The overall speed of your machines is learned quickly, so choose one in which the methods "
        "compare as on your machines.",
    )
    guardrail: GuardrailSettings = Field(default=GuardrailSettings(), description=GuardrailSettings.__doc__)
    outlier_ejection: bool = Field(
        default=True, description=PolicySettings.model_fields["outlier_ejection"].description
    )
    shadow_drafting: ShadowSettings = Field(default=ShadowSettings(), description=ShadowSettings.__doc__)

    @field_validator("calibration")
    @classmethod
    def _known(cls, name: str) -> str:
        return load_calibration(name).name


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1e-3 * milliseconds
