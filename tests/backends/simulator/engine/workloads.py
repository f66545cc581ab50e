"""Random engines and requests, the same on every machine."""

from __future__ import annotations

from random import Random

import numpy as np

from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import k_by_batch
from backends.drafting.script import Script, block_hashes
from tests.support.step_time import DRAFTING, STEP


class Draws(Random):
    """Draws that no version of Python changes: all come from `random()`."""

    def below(self, bound: int) -> int:
        return int(self.random() * bound)

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)


def drawn_parameters(draws: Draws) -> EngineParameters:
    k = draws.below(6)
    drafting = DRAFTING.model_copy(update={"parallel": draws.random() < 0.5})
    return EngineParameters(
        STEP,
        drafting,
        k=k,
        k_by_batch=k_by_batch([[1, 2, k], [3, 5, 1]], k) if k and draws.random() < 0.5 else (),
        max_num_seqs=draws.between(2, 12),
        max_num_batched_tokens=draws.between(8, 120),
        kv_blocks=draws.between(14, 60),
        prefix_caching=draws.random() < 0.8,
    )


def drawn_request(draws: Draws, k: int) -> Script:
    prompt, output = draws.between(1, 110), draws.between(1, 80)
    emitted = np.array([1] + [min(draws.between(1, k + 1), output - at) for at in range(1, output)], np.int32)
    drafted = np.array([0] + [max(int(emitted[at]) - 1, draws.below(k + 1)) for at in range(1, output)], np.int32)
    head = draws.below(min(prompt, 80) + 1)  # tokens that it shares with others of the same beginning
    tokens = [draws.below(3), *range(head), *(draws.between(1000, 9000) for _ in range(prompt + output))]
    return Script(
        prompt, output, emitted, drafted, block_hashes(tokens[: prompt + output]) if draws.random() < 0.8 else ()
    )
