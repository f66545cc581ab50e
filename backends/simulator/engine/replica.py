"""A fleet from the outside: its replicas, as policies see them, and completed requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from backends.backend import Candidate, EngineLoad
from backends.calibration.calibration import Calibration
from backends.calibration.draft_profile import DraftProfile, draft_profile
from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import DraftSchedule
from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.engine.state import Records, replica_record
from backends.speculation import Method


class Completion(NamedTuple):
    """A completed request."""

    request_id: int
    replica: int  # index in the fleet
    # arrived_s, first_s, ended_s: times of arrival, first token and last token, on the virtual clock.
    arrived_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    steps: int  # steps that emitted tokens for it, including the last step of its prefill
    # drafted, accepted: draft tokens verified and accepted for it.
    drafted: int
    accepted: int
    preemptions: int

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the last token."""
        return self.ended_s - self.arrived_s

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens after the first, per step after the prefill; None if there was no such step."""
        return (self.output_tokens - 1) / (self.steps - 1) if self.steps > 1 else None


class SimulatedReplica(Candidate):
    """One engine of a fleet, as a policy sees it.

    `in_flight` is exact, as in a gateway without peers; `load` is the engine's last report.
    """

    def __init__(
        self,
        name: str,
        calibration: Calibration,
        method: Method,
        speculative_config: Mapping[str, Any] | None = None,
        *,
        parameters: EngineParameters | None = None,
        weight: float = 1.0,
    ) -> None:
        self.name = name
        self.method = method
        self.weight = weight
        self.in_flight = 0
        self.load = EngineLoad()
        # Limits and step times; from the calibration if None.
        self.parameters = parameters or EngineParameters.of(calibration, method, speculative_config)
        self.num_speculative_tokens = self.parameters.k
        # _calibration, method, _config: source of the acceptance of requests without a script.
        self._calibration = calibration
        self._config = dict(speculative_config or {})
        self.draft_schedule = DraftSchedule(self.parameters.k, self.parameters.k_by_batch, self.parameters.adaptive)
        self.drafter_limit = self.parameters.drafter_limit
        self._records: Records = replica_record(self.parameters)  # replaced by the fleet's in `join`
        self._number = 0

    @property
    def steps(self) -> int:
        """Number of steps begun."""
        return int(self._records[self._number]["steps"])

    def profile(self, kind: str, temperature: float) -> DraftProfile:
        """Return the draft profile for requests without a known text."""
        return draft_profile(self._calibration, self.method, self._config, temperature=temperature, kind=kind)

    def report(self, at_s: float) -> EngineLoad:
        """Update `load` and return it."""
        record = self._records[self._number]
        usage = float(record["used"] / record["kv_blocks"])
        kv_tokens = int(record["kv_blocks"]) * BLOCK_TOKENS
        self.load = EngineLoad(int(record["running"]), int(record["waiting"]), usage, at_s=at_s, kv_tokens=kv_tokens)
        return self.load

    def join(self, records: Records, number: int) -> None:
        """Attach the replica to a fleet's records; called by the fleet."""
        self._records, self._number, self.in_flight = records, number, 0
