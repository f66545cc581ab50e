"""The real vLLM takes the schedules that `gateway plan` writes, and reads them as the simulator does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from backends.calibration.batch_schedule import SCHEDULED, with_ranges
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method, SpeculativeConfig, method_issues
from lab.simulation.drafts import best_schedule

LONGEST_BATCH = 256
ACCEPTED = {
    "poor": (0.45, 0.2, 0.09, 0.04),
    "usual": (0.7, 0.5, 0.35, 0.25, 0.18),
    "good": tuple(0.85**position for position in range(1, 9)),
}
CALIBRATIONS = ("llama-3.1-8b-h100", "llama-3-70b-2xh200", "qwen3-30b-a3b")

pytestmark = pytest.mark.vllm

ASK = """
from vllm.config.speculative import SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

def read(config, longest):
    # n-gram needs no weights; the rules of the schedule are those of every method.
    parsed = SpeculativeConfig(**{**config, "method": "ngram"})
    assert parsed.uses_dynamic_speculative_decoding()
    return build_dynamic_sd_schedule_lookup(
        [list(one) for one in parsed.num_speculative_tokens_per_batch_size], longest, parsed.num_speculative_tokens
    )

longest, configs = given
answer = [read(config, longest) for config in configs]
"""


def written() -> list[tuple[str, Method, dict[str, Any]]]:
    """Return what is written for each machine, method and acceptance, as calibration, method and config."""
    configs = []
    for name in CALIBRATIONS:
        for method in sorted(SCHEDULED):
            for accepted in ACCEPTED.values():
                config: dict[str, Any] = {"num_speculative_tokens": len(accepted)}
                per_step = tuple(accumulate((1.0, *accepted)))
                ranges = best_schedule(load_calibration(name), method, config, per_step, 500.0, LONGEST_BATCH)
                if len(ranges) > 1:
                    configs.append((name, method, with_ranges(config, ranges)))
    return configs


def test_vllm_reads_each_written_schedule_as_the_simulator_does(in_vllm: Callable[..., Any]) -> None:
    configs = written()
    assert len(configs) > 20
    lookups = in_vllm(ASK, [LONGEST_BATCH, [config for _, _, config in configs]])
    for (name, method, config), lookup in zip(configs, lookups, strict=True):
        parameters = EngineParameters.of(load_calibration(name), method, config)
        assert lookup[1:] == list(parameters.k_by_batch[1 : LONGEST_BATCH + 1])
        assert max(lookup) <= config["num_speculative_tokens"]
        SpeculativeConfig.model_validate(config)
        assert method_issues(method, {**config, "model": "a-draft"}, served=True) == []
