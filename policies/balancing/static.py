"""The `static` policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Self

from pydantic import Field, model_validator

from backends.backend import Candidate
from backends.speculation import Method
from policies.features.request import RequestFeatures
from policies.load_policy import LoadPolicy, LoadSettings
from policies.policy import Assessment, Decision, SettingsPath, register


class StaticSettings(LoadSettings):
    """The destination of all requests: exactly one of `backend` and `method`."""

    backend: str | None = Field(default=None, description="Name of the backend that gets every request.")
    method: Method | None = Field(default=None, description="Method whose least loaded backend gets every request.")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.backend is None) == (self.method is None):
            raise ValueError("static takes either `backend: NAME` or `method: METHOD`")
        return self

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the configured backend, if `backend` is set."""
        return {} if self.backend is None else {("backend",): self.backend}


@register
class Static(LoadPolicy):
    """A policy that always picks one backend, or the least loaded of one method; if none is available, any backend."""

    name = "static"
    reads_requests = False
    Settings = StaticSettings
    settings: StaticSettings

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose the least loaded configured candidate, or the least loaded of all if none is configured."""
        configured = [candidate for candidate in candidates if self._is_configured(candidate)]
        chosen, propensity = self.meter.least(configured or candidates, rng or self.rng)
        reason = "configured" if configured else "configured_unavailable"
        return Decision(chosen.name, self.name, reason, propensity)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by its load, noting whether it is configured."""
        return [
            replace(load, note=f"{'' if self._is_configured(candidate) else 'not '}configured; {load.note}")
            for candidate, load in zip(candidates, super().assess(request, candidates), strict=True)
        ]

    def _is_configured(self, candidate: Candidate) -> bool:
        return candidate.name == self.settings.backend or candidate.method == self.settings.method
