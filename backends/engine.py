"""What is known of one engine, from the start of its process to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.acceptance import AcceptanceOfLate
from backends.engine_metrics import EngineMetrics
from backends.occupancy import Occupancy
from backends.step_comparison import StepComparison


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine says of itself besides its metrics, as last read."""

    card: Mapping[str, object] | None = None  # the model's entry in its `/v1/models`; None before that was read
    context_tokens: int = 0  # tokens of the longest context, by that entry; 0 if it does not say
    served: tuple[str, ...] = ()  # names of its models, without adapters
    adapters: frozenset[str] = frozenset()  # names of the LoRA adapters that it has loaded
    version: str = ""  # of its vLLM, if that is asked for; empty if it does not say
    tells_pause: bool = False  # whether it tells that it is paused: in development mode


@dataclass(slots=True)
class Engine:
    """One engine; a restart makes another one, so that no fact outlives the engine that it is of."""

    said: Said = field(default_factory=Said)
    metrics: EngineMetrics | None = None  # its last metrics page; None if it has none
    acceptance: AcceptanceOfLate = field(default_factory=AcceptanceOfLate)
    occupancy: Occupancy = field(default_factory=Occupancy)
    comparison: StepComparison = field(default_factory=StepComparison)
    habits: Any = None  # what the relay has learned of its streams
