"""Settings of a simulator process, validated before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.drafter_limit import DrafterLimit
from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.drafting.proposers import Proposer
from backends.speculation import Method


class ReplicaSettings(BaseModel):
    """Settings of one simulated replica.

    Examples
    --------
    >>> settings = ReplicaSettings(name="a", model="llama")
    >>> settings.names, settings.engine_parameters().k
    (('llama',), 0)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    model: str = Field(min_length=1)  # target model; replicas of one model write the same answers to greedy requests
    served_model_names: tuple[str, ...] = ()  # model names that clients may use; the model's own name if empty
    method: Method = Method.BASELINE
    speculative_config: dict[str, Any] = Field(default_factory=dict)
    calibration: str = "llama-3.1-8b-h100"
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)  # port to listen on; 0: the system chooses one
    seed: int = 0  # of the draws of acceptance, for methods with a draft model
    api_key: str | None = Field(default=None, repr=False)
    max_model_len: int | None = Field(default=None, ge=2)  # the longest context; None: the calibration's
    drafter_limit: DrafterLimit | None = None  # the drafter's longest context; None: the calibration's
    draft_depth: bool = False  # whether it drafts to the depth that each request asks for
    # Real seconds per simulated second: 0.1 runs ten times as fast.
    time_scale: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _can_be_simulated(self) -> Self:
        self.proposer()
        most, wanted = self.engine_parameters().max_model_len, self.max_model_len
        if wanted is not None and most < wanted:
            raise ValueError(f"max_model_len {wanted} does not fit into the KV cache, which holds {most}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Model names that clients may use; the first is the default."""
        return self.served_model_names or (self.model,)

    def proposer(self) -> Proposer:
        """Return a new proposer for the replica."""
        calibration, most = load_calibration(self.calibration), self.engine_parameters().max_model_len
        return Proposer(self.method, self.speculative_config, calibration, self.seed, most)

    def engine_parameters(self) -> EngineParameters:
        """Return the engine's parameters, with the context cut to what fits into the KV cache."""
        parameters = EngineParameters.of(
            load_calibration(self.calibration),
            self.method,
            self.speculative_config,
            max_model_len=self.max_model_len,
            drafter_limit=self.drafter_limit,
        )
        room = parameters.kv_blocks * BLOCK_TOKENS - parameters.k
        return replace(parameters, max_model_len=min(room, parameters.max_model_len))


class SimulatorSettings(BaseModel):
    """Settings of all replicas in one process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: tuple[ReplicaSettings, ...] = Field(min_length=1)
