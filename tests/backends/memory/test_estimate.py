"""Memory estimates against published figures and against the calibrations."""

from __future__ import annotations

import csv

import pytest

from backends.calibration.calibration import load_calibration
from backends.memory.catalogue import catalogue, draft, gpu, target
from backends.memory.estimate import Footprint, Machine, fit, footprint, kv_kib_per_token, kv_room, weights_gib
from backends.speculation import Method
from tests.support.paths import ROOT

FACTS = ROOT.parent / "shared" / "facts"

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


def _rows_of_the_facts() -> list[tuple[str, str, str, str, str]]:
    rows = csv.DictReader((FACTS / "memory.csv").read_text().splitlines())
    return [
        (row["target"], method, row["draft"] or "", row["static_gib_fp16"], row["kv_kib_per_token"])
        for row in rows
        for method in row["method"].split("|")
    ]


def _digits(value: float, as_published: str) -> str:
    return f"{value:.{len(as_published.partition('.')[2])}f}"


@pytest.mark.parametrize(("of", "method", "with_draft", "gib", "kib"), PUBLISHED)
def test_memory_equals_the_published_figures(of: str, method: str, with_draft: str, gib: str, kib: str) -> None:
    own_target = target(of)
    assert own_target is not None
    own_draft = draft(own_target, Method(method))
    assert own_draft == (catalogue().drafts[with_draft] if with_draft else None)
    held = footprint(own_target, own_draft)
    assert _digits(held.weights_gib, gib) == gib
    assert _digits(held.kv_kib_per_token, kib) == kib


@pytest.mark.skipif(not (FACTS / "memory.csv").exists(), reason="the published tables are not part of the project")
def test_all_rows_of_the_published_table_are_tested() -> None:
    assert {row for row in _rows_of_the_facts() if row in PUBLISHED} == set(_rows_of_the_facts()) - {
        ("llama-3-70b", "ngram", "", "131.4", "320"),
        ("llama-3-70b", "suffix", "", "131.4", "320"),
        ("qwen3-8b", "ngram", "", "15.25", "144"),
        ("qwen3-8b", "suffix", "", "15.25", "144"),
    }  # methods without a draft on the GPU are tested once


@pytest.mark.skipif(not (FACTS / "model_specs.csv").exists(), reason="the published tables are not part of the project")
def test_shapes_equal_the_published_ones() -> None:
    names = {name.rpartition("/")[2].lower(): entry for entry in catalogue().targets.values() for name in entry.names}
    names |= {"llama-3-70b-instruct": catalogue().targets["llama-3-70b"]}
    drafts = dict(catalogue().drafts) | {"llama-3.2-1b-instruct": catalogue().drafts["llama-3.2-1b"]}
    for row in csv.DictReader((FACTS / "model_specs.csv").read_text().splitlines()):
        shape = names.get(row["model"]) or drafts[row["model"]]
        assert (shape.layers, shape.kv_heads, shape.head_dim) == tuple(
            int(row[key]) for key in ("layers", "kv_heads", "head_dim")
        )
        printed = row["params_billion"]
        # The source truncates: 1.2358 is printed as 1.23.
        assert abs(shape.parameters / 1e9 - float(printed)) <= 10.0 ** -len(printed.partition(".")[2])


def test_parameters_counted_from_layers_equal_the_published_ones() -> None:
    for short, entry in catalogue().drafts.items():
        if entry.method not in (Method.EAGLE, Method.EAGLE3):
            continue
        of = catalogue().targets[entry.targets[0]]
        unknown = of.model_copy(update={"names": ("some/other",)})
        counted = draft(unknown, entry.method)
        assert counted is not None
        assert (counted.parameters, counted.layers) == (entry.parameters, entry.layers), short


def test_medusa_has_a_head_per_position_and_no_kv_cache() -> None:
    of = target("meta-llama/llama-3.1-8b-instruct")
    assert of is not None
    three, five = draft(of, Method.MEDUSA, 3), draft(of, Method.MEDUSA, 5)
    assert three is not None
    assert five is not None
    assert five.parameters * 3 == three.parameters * 5
    assert kv_kib_per_token(three) == 0


def test_a_draft_of_unknown_size_is_none() -> None:
    of = target("qwen3-30b-a3b")
    assert of is not None
    assert draft(of, Method.DSPARK) is None
    assert draft(of.model_copy(update={"names": ("some/other",)}), Method.DRAFT_MODEL) is None
    assert target("no/such-model") is None
    with pytest.raises(ValueError, match=r"no such GPU: 'h10'; .*h100"):
        gpu("h10")


def test_smaller_dtypes_take_less_memory() -> None:
    of = target("llama-3.1-8b")
    head = catalogue().drafts["eagle3-llama3.1-instruct-8b"]
    assert of is not None
    held = footprint(of, head, dtype="fp8", draft_dtype="bf16", kv_dtype="fp8")
    assert held.target_gib == weights_gib(of) / 2
    assert held.draft_gib == weights_gib(head)
    assert held.kv_kib_per_token == 66
    with pytest.raises(ValueError, match="no such dtype: 'int3'"):
        footprint(of, dtype="int3")


@pytest.mark.parametrize("method", [Method.BASELINE, Method.EAGLE, Method.EAGLE3, Method.DRAFT_MODEL])
def test_the_kv_cache_equals_that_of_the_calibration(method: Method) -> None:
    calibration = load_calibration("llama-3.1-8b-h100")
    of = target(calibration.target)
    assert of is not None
    held = footprint(of, draft(of, method))
    memory = calibration.memory
    machine = Machine(gpu("h100"), utilization=memory.utilization, reserved_gib=memory.reserved_gib)
    _, tokens = kv_room(held, machine)
    assert tokens == pytest.approx(calibration.kv_tokens(method), rel=2e-3)  # the calibration rounds 79.65 GiB to 79.6


def test_the_kv_cache_over_several_gpus_equals_that_of_the_calibration() -> None:
    calibration = load_calibration("llama-3.1-70b-4xh100")
    of = target(calibration.target)
    assert of is not None
    _, tokens = kv_room(footprint(of), Machine(gpu("h100"), tensor_parallel=4))
    assert tokens == pytest.approx(calibration.kv_tokens(Method.BASELINE), rel=2e-3)


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
    assert (
        single.reason
        == "131.42 GiB of weights do not fit on 1x H100 80GB HBM3: 62.7 GiB short; 2 of them would be enough"
    )
    assert fit(footprint(seventy), Machine(gpu("h100"), 2)).kv_gib > 0

    short = fit(footprint(eight), Machine(gpu("l4")), max_model_len=131_072)
    assert not short.fits
    assert 0 < short.tokens < 131_072
    assert f"it would start with --max-model-len {short.tokens}" in short.reason
    assert fit(footprint(eight), Machine(gpu("l4")), max_model_len=short.tokens).fits


def test_a_draft_above_its_share_does_not_fit() -> None:
    machine = Machine(gpu("l40s"))
    memory = machine.gpu.memory_gib
    plain = Footprint(15.0, 128.0)
    within = fit(Footprint(15.0, 128.0, draft_gib=0.149 * memory, draft_kv_kib=32), machine)
    over = fit(Footprint(15.0, 128.0, draft_gib=0.151 * memory, draft_kv_kib=32), machine)
    assert within.fits
    assert not over.fits
    assert "15% of 1x L40S 48GB" in over.reason
    _, tokens = kv_room(plain, machine)
    assert within.tokens_lost == pytest.approx(1 - within.tokens / tokens)
    assert "fewer than without the draft" in within.reason


def test_a_target_that_would_fit_without_its_draft_is_reported() -> None:
    reason = fit(Footprint(30.0, 128.0, draft_gib=10.0), Machine(gpu("l40s"))).reason
    assert reason.endswith("; the target alone would fit")


def test_invalid_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one GPU"):
        Machine(gpu("h100"), tensor_parallel=0)
    with pytest.raises(ValueError, match="utilization"):
        Machine(gpu("h100"), utilization=1.2)
