"""What is seen of a fleet from outside: its replicas, as policies look at them, and the requests that have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from backends.backend import EngineLoad
from backends.calibration.calibration import Calibration
from backends.calibration.draft_profile import DraftProfile, draft_profile
from backends.calibration.parameters import EngineParameters
from backends.simulator.engine.state import Records, replica_record
from backends.speculation import Method


class Completion(NamedTuple):
    """A request that has ended.

    Parameters
    ----------
    replica
        Its position in the fleet.
    arrived_s, first_s, ended_s
        When it came, spoke first and ended, on the virtual clock.
    cached_tokens
        Prompt tokens found in the prefix cache.
    steps
        Steps that gave it tokens, its prefill's last one included.
    drafted, accepted
        Draft tokens verified and accepted for it.
    """

    request_id: int
    replica: int
    arrived_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    steps: int
    drafted: int
    accepted: int
    preemptions: int

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Seconds from its arrival to its last token."""
        return self.ended_s - self.arrived_s

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens after the first for each step after the prefill; None where there was none."""
        return (self.output_tokens - 1) / (self.steps - 1) if self.steps > 1 else None


class Replica:
    """One engine of a fleet, as a policy sees it (a `backends.backend.Candidate`).

    `in_flight` is exact, as it is in a gateway that is the only one; `load` is what the engine last reported.

    Parameters
    ----------
    parameters
        Its limits and step times.
    calibration, method, speculative_config
        From which requests without a script are drafted for.
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
        self.parameters = parameters or EngineParameters.of(calibration, method, speculative_config)
        self.num_speculative_tokens = self.parameters.k
        self._calibration = calibration
        self._config = dict(speculative_config or {})
        self._records: Records = replica_record(self.parameters)  # the fleet's, once it is in one
        self._number = 0

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of prompts, and of what has been said so far, of the requests it is working on."""
        return int(self._records[self._number]["tokens_in_flight"])

    @property
    def busy_s(self) -> float:
        """Seconds it has spent in steps."""
        return float(self._records[self._number]["busy_s"])

    @property
    def steps(self) -> int:
        """Steps that it has begun."""
        return int(self._records[self._number]["steps"])

    def profile(self, kind: str, temperature: float) -> DraftProfile:
        """Return how it drafts for requests of which no text is known."""
        return draft_profile(self._calibration, self.method, self._config, temperature=temperature, kind=kind)

    def report(self, at_s: float) -> EngineLoad:
        """Bring `load` up to date, and return it."""
        record = self._records[self._number]
        usage = float(record["used"] / record["kv_blocks"])
        self.load = EngineLoad(int(record["running"]), int(record["waiting"]), usage, at_s=at_s)
        return self.load

    def join(self, records: Records, number: int) -> None:
        """Become one of a fleet; the fleet calls this."""
        self._records, self._number, self.in_flight = records, number, 0
