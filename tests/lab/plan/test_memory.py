"""Memory estimates against published figures and against the calibrations."""

from __future__ import annotations

import pytest

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from lab.plan.catalogue import catalogue, draft, gpu, target
from lab.plan.memory import Footprint, Machine, fit, footprint, kv_room

# "Speculative Decoding: Performance or Illusion?", arXiv 2601.11580: static memory in GiB (fp16), KV in KiB per token.
PUBLISHED = [
    ("llama-3.1-8b", "baseline", "", "14.96", "128"),
    ("llama-3.1-8b", "ngram", "", "14.96", "128"),
    ("llama-3.1-8b", "suffix", "", "14.96", "128"),
    ("llama-3.1-8b", "eagle", "eagle-llama3.1-instruct-8b", "15.43", "132"),
    ("llama-3.1-8b", "eagle3", "eagle3-llama3.1-instruct-8b", "15.75", "132"),
    ("llama-3-70b", "baseline", "", "131.4", "320"),
    ("llama-3-70b", "eagle", "eagle-llama3-instruct-70b", "133.3", "324"),
    ("llama-3-70b", "draft_model", "llama-3.2-1b", "133.7", "352"),
    ("qwen3-8b", "baseline", "", "15.25", "144"),
    ("qwen3-8b", "eagle3", "eagle3-qwen3-8b", "16.00", "148"),
    ("qwen3-8b", "draft_model", "qwen3-0.6b", "16.37", "256"),
]


def _digits(value: float, as_published: str) -> str:
    return f"{value:.{len(as_published.partition('.')[2])}f}"


@pytest.mark.parametrize(("of", "method", "with_draft", "gib", "kib"), PUBLISHED)
def test_memory_equals_the_published_figures(of: str, method: str, with_draft: str, gib: str, kib: str) -> None:
    own_target = target(of)
    assert own_target is not None
    own_draft = draft(of, Method(method))
    assert own_draft == (catalogue().drafts[with_draft] if with_draft else None)
    held = footprint(own_target, own_draft)
    assert _digits(held.weights_gib, gib) == gib
    assert _digits(held.kv_kib_per_token, kib) == kib


def test_what_is_unknown_is_none_or_an_error() -> None:
    assert draft("qwen3-30b-a3b", Method.DSPARK) is None
    assert draft("no/such-model", Method.EAGLE3) is None
    assert target("no/such-model") is None
    with pytest.raises(ValueError, match=r"no such GPU: 'h10'; .*h100"):
        gpu("h10")


@pytest.mark.parametrize(
    ("name", "gpus", "method"),
    [
        *(("llama-3.1-8b-h100", 1, method) for method in ("baseline", "eagle", "eagle3", "draft_model")),
        ("llama-3.1-70b-4xh100", 4, "baseline"),
    ],
)
def test_the_kv_cache_equals_that_of_the_calibration(name: str, gpus: int, method: str) -> None:
    calibration = load_calibration(name)
    of = target(calibration.target)
    assert of is not None
    held = footprint(of, draft(calibration.target, Method(method)))
    _, tokens = kv_room(held, Machine(gpu("h100"), gpus))
    # The calibration rounds 79.65 GiB to 79.6.
    assert tokens == pytest.approx(calibration.kv_tokens(Method(method)), rel=2e-3)


def test_kv_heads_are_replicated_if_there_are_more_gpus() -> None:
    held = Footprint(target_gib=16.0, target_kv_kib=96.0, target_kv_heads=4)
    four = kv_room(held, Machine(gpu("h100"), tensor_parallel=4))
    eight = kv_room(held, Machine(gpu("h100"), tensor_parallel=8))
    assert eight[0] > 2 * four[0]
    assert eight[1] < 1.1 * four[1]


def test_a_replica_that_does_not_fit_has_a_reason() -> None:
    seventy = target("llama-3-70b")
    eight = target("llama-3.1-8b")
    assert seventy is not None
    assert eight is not None
    single = fit(footprint(seventy), Machine(gpu("h100")))
    assert not single.fits
    assert single.tokens == 0
    assert single.kv_gib == pytest.approx(79.65 * 0.9 - 3 - 131.42, abs=0.01)
    assert single.reason == "131.42 GiB of weights do not fit on 1x H100 80GB HBM3: 62.7 GiB short"
    assert fit(footprint(seventy), Machine(gpu("h100"), 2)).kv_gib > 0

    short = fit(footprint(eight), Machine(gpu("l4")), max_model_len=131_072)
    assert not short.fits
    assert 0 < short.tokens < 131_072
    assert f"it would start with --max-model-len {short.tokens}" in short.reason
    assert fit(footprint(eight), Machine(gpu("l4")), max_model_len=short.tokens).fits


def test_a_draft_above_its_share_does_not_fit() -> None:
    machine = Machine(gpu("l40s"))
    memory = machine.gpu.memory_gib
    within = fit(Footprint(15.0, 128.0, draft_gib=0.149 * memory, draft_kv_kib=32), machine)
    over = fit(Footprint(15.0, 128.0, draft_gib=0.151 * memory, draft_kv_kib=32), machine)
    assert within.fits
    assert not over.fits
    assert "15% of 1x L40S 48GB" in over.reason
