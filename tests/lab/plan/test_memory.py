"""Whether replicas fit into memory."""

from __future__ import annotations

from typing import Any

import pytest

from backends.calibration.calibration import Calibration
from backends.calibration.load import load_calibration
from backends.speculation import Method
from lab.plan.memory import fit

H100 = load_calibration("llama-3.1-8b-h100")


def with_memory(**changes: Any) -> Calibration:
    return H100.model_copy(update={"memory": H100.memory.model_copy(update=changes)})


@pytest.mark.parametrize("method", sorted(H100.methods))
def test_the_kv_cache_is_that_of_the_simulator_in_whole_blocks(method: Method) -> None:
    own = fit(H100, method)
    assert own.fits
    assert own.tokens == H100.kv_tokens(method) // 16 * 16


def test_a_replica_that_does_not_fit_has_a_reason() -> None:
    large = fit(with_memory(weights_gib=80.0), Method.BASELINE)
    assert (large.fits, large.tokens) == (False, 0)
    assert large.kv_gib < 0
    assert large.reason == "80.00 GiB of weights do not fit on 1x H100 80GB: 11.4 GiB short"
    short = fit(with_memory(gpu_gib=24.0), Method.BASELINE, 131_072)
    assert not short.fits
    assert 0 < short.tokens < 131_072
    assert f"it would start with --max-model-len {short.tokens}" in short.reason
    assert fit(with_memory(gpu_gib=24.0), Method.BASELINE, short.tokens).fits
    large_draft = fit(with_memory(gpu_gib=2.29 / 0.151, weights_gib=1.0), Method.DRAFT_MODEL)
    assert not large_draft.fits
    assert "are 15% of 1x H100 80GB; above 15% a draft costs more context" in large_draft.reason
    assert fit(with_memory(gpu_gib=2.29 / 0.149, weights_gib=1.0), Method.DRAFT_MODEL).fits
