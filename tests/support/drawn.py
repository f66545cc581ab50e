"""The steps that a fleet draws for a request without a text, as a script."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.drafting.script import Script
from backends.simulator.engine import draws
from backends.simulator.engine.compiled import compiled
from backends.simulator.engine.fleet import Fleet
from backends.simulator.engine.state import FleetState


def drawn_script(
    fleet: Fleet,
    request_id: int,
    output_tokens: int,
    kind: str = "chat",
    temperature: float = 0.0,
    prompt_tokens: int = 1,
) -> Script:
    """Return all steps that a request draws on the first replica."""
    emitted, drafted = np.ones(output_tokens, np.int32), np.zeros(output_tokens, np.int32)
    profile, k = fleet._profile_for(0, kind, temperature), fleet.replicas[0].parameters.k
    _draw(fleet._state, fleet.seed, request_id, profile, k, prompt_tokens, emitted, drafted)
    return Script(prompt_tokens, output_tokens, emitted, drafted)


@compiled
def _draw(
    state: FleetState,
    seed: int,
    request_id: int,
    profile: int,
    k: int,
    prompt: int,
    emitted: npt.NDArray[np.int32],
    drafted: npt.NDArray[np.int32],
) -> None:
    profiles, progress = state.profiles, state.progress
    key = draws.request_key(seed, request_id)
    odds = draws.request_odds(key, profiles[profile].spread)
    for position in range(1, len(emitted)):
        count = draws.draw_drafts(profiles, state.drafted, profile, key, odds, position, k)
        emits = 1 + draws.draw_accepted(
            profiles, state.accepted, progress, state.context, profile, key, odds, prompt, position, count
        )
        drafted[position] = count
        emitted[position] = min(emits, len(emitted) - position)
