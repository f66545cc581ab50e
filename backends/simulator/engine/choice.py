"""The choice of an oracle that knows how many steps each request takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.simulator.engine import draws
from backends.simulator.engine.compiled import compiled
from backends.simulator.engine.state import DRAWN, EXCLUDED, Floats, Records


@compiled
def least_delay(  # noqa: PLR0917 -- see `advance`
    replicas: Records,
    requests: Records,
    batches: npt.NDArray[np.int32],
    profiles: Records,
    drafted: Floats,
    accepted: Floats,
    progress: Floats,
    contexts: Floats,
    rows: npt.NDArray[np.int64],
    costs: Floats,
    steps: npt.NDArray[np.int64],
    last_steps: npt.NDArray[np.int64],
    seed: int,
    request_id: int,
    prompt: int,
    output: int,
) -> int:
    """Return the replica that least delays the next request and those in flight; see `Fleet.least_delay`."""
    key = draws.request_key(seed, request_id)
    context = prompt + output / 2
    best, least_s = 0, np.inf
    for number in range(len(replicas)):
        if steps[number] == EXCLUDED:
            continue
        replica = replicas[number]
        if steps[number] == DRAWN:
            for other in range(number):
                if rows[other] == rows[number] and replicas[other].k == replica.k:
                    steps[number] = steps[other]
                    break
            else:
                steps[number] = draws.count_drawn(
                    profiles, drafted, accepted, progress, contexts, rows[number], key, replica.k, prompt, output
                )
        base_s, per_request_s, per_context_token_s, per_prompt_token_s = costs[number]
        count = replica.running + replica.waiting
        own_s = per_request_s + per_context_token_s * context
        delay_s = steps[number] * (base_s + own_s) + per_prompt_token_s * prompt * (1 + count)
        shared_s = 0.0
        slot = replica.first
        for column in range(count):
            if column < replica.running:
                request = requests[batches[number, column]]
            else:
                request = requests[slot]
                slot = request.following
            left = max(1, last_steps[request.id] - replica.steps)
            adds_s = per_request_s + per_context_token_s * (request.prompt + request.output / 2)
            shared_s += (adds_s + own_s) * min(steps[number], left)
        delay_s += shared_s
        if delay_s < least_s:
            best, least_s = number, delay_s
    return best
