"""The memory arithmetic against what was published, and against the simulator's own."""

from __future__ import annotations

import csv

import pytest

from backends.calibration.calibration import load_calibration
from backends.memory.catalogue import catalogue, draft, gpu, target
from backends.memory.estimate import Footprint, Machine, fit, footprint, kv_kib_per_token, kv_room, weights_gib
from backends.speculation import Method
from tests.support.paths import ROOT

FACTS = ROOT.parent / "shared" / "facts"

# "Speculative Decoding: Performance or Illusion?", arXiv 2601.11580: static memory in GiB (fp16) and KV in KiB a token.
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
def test_published_memory_to_the_digit(of: str, method: str, with_draft: str, gib: str, kib: str) -> None:
    own_target = target(of)
    assert own_target is not None
    own_draft = draft(own_target, Method(method))
    assert own_draft == (catalogue().drafts[with_draft] if with_draft else None)
    held = footprint(own_target, own_draft)
    assert _digits(held.weights_gib, gib) == gib
    assert _digits(held.kv_kib_per_token, kib) == kib


@pytest.mark.skipif(not (FACTS / "memory.csv").exists(), reason="the published tables are not part of the project")
def test_every_row_of_the_published_table_is_tested() -> None:
    assert {row for row in _rows_of_the_facts() if row in PUBLISHED} == set(_rows_of_the_facts()) - {
        ("llama-3-70b", "ngram", "", "131.4", "320"),
        ("llama-3-70b", "suffix", "", "131.4", "320"),
        ("qwen3-8b", "ngram", "", "15.25", "144"),
        ("qwen3-8b", "suffix", "", "15.25", "144"),
    }  # what keeps nothing on the GPU is one test


@pytest.mark.skipif(not (FACTS / "model_specs.csv").exists(), reason="the published tables are not part of the project")
def test_shapes_are_the_published_ones() -> None:
    names = {one.rpartition("/")[2].lower(): entry for entry in catalogue().targets.values() for one in entry.names}
    names |= {"llama-3-70b-instruct": catalogue().targets["llama-3-70b"]}
    drafts = dict(catalogue().drafts) | {"llama-3.2-1b-instruct": catalogue().drafts["llama-3.2-1b"]}
    for row in csv.DictReader((FACTS / "model_specs.csv").read_text().splitlines()):
        shape = names.get(row["model"]) or drafts[row["model"]]
        assert (shape.layers, shape.kv_heads, shape.head_dim) == tuple(
            int(row[key]) for key in ("layers", "kv_heads", "head_dim")
        )
        printed = row["params_billion"]
        # 1.2358 is printed as 1.23: the source cuts off where others round.
        assert abs(shape.parameters / 1e9 - float(printed)) <= 10.0 ** -len(printed.partition(".")[2])


def test_heads_counted_from_layers_are_the_published_ones() -> None:
    for short, entry in catalogue().drafts.items():
        if entry.method not in (Method.EAGLE, Method.EAGLE3):
            continue
        of = catalogue().targets[entry.of[0]]
        unknown = of.model_copy(update={"names": ("some/other",)})
        counted = draft(unknown, entry.method)
        assert counted is not None
        assert (counted.parameters, counted.layers) == (entry.parameters, entry.layers), short


def test_medusa_has_heads_for_each_position_and_no_kv_cache() -> None:
    of = target("meta-llama/llama-3.1-8b-instruct")
    assert of is not None
    three, five = draft(of, Method.MEDUSA, 3), draft(of, Method.MEDUSA, 5)
    assert three is not None
    assert five is not None
    assert five.parameters * 3 == three.parameters * 5
    assert kv_kib_per_token(three) == 0


def test_a_draft_whose_size_does_not_follow_is_not_made_up() -> None:
    of = target("qwen3-30b-a3b")
    assert of is not None
    assert draft(of, Method.DSPARK) is None
    assert draft(of.model_copy(update={"names": ("some/other",)}), Method.DRAFT_MODEL) is None
    assert target("no/such-model") is None
    with pytest.raises(ValueError, match=r"no such GPU: 'h10'; .*h100"):
        gpu("h10")


def test_smaller_dtypes() -> None:
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
def test_room_is_what_the_simulator_reckons_with(method: Method) -> None:
    calibration = load_calibration("llama-3.1-8b-h100")
    of = target(calibration.target)
    assert of is not None
    held = footprint(of, draft(of, method))
    memory = calibration.memory
    machine = Machine(gpu("h100"), utilization=memory.utilization, reserved_gib=memory.reserved_gib)
    _, tokens = kv_room(held, machine)
    assert tokens == pytest.approx(calibration.kv_tokens(method), rel=2e-3)  # 79.65 GiB is 79.6 there


def test_room_over_several_gpus() -> None:
    calibration = load_calibration("llama-3.1-70b-4xh100")
    of = target(calibration.target)
    assert of is not None
    _, tokens = kv_room(footprint(of), Machine(gpu("h100"), tensor_parallel=4))
    assert tokens == pytest.approx(calibration.kv_tokens(Method.BASELINE), rel=2e-3)


def test_kv_heads_are_kept_twice_over_more_gpus_than_there_are() -> None:
    held = Footprint(target_gib=16.0, target_kv_kib=96.0, target_kv_heads=4)
    four = kv_room(held, Machine(gpu("h100"), tensor_parallel=4))
    eight = kv_room(held, Machine(gpu("h100"), tensor_parallel=8))
    assert eight[0] > 2 * four[0]
    assert eight[1] < 1.1 * four[1]


def test_what_does_not_fit_says_why() -> None:
    seventy = target("llama-3-70b")
    eight = target("llama-3.1-8b")
    assert seventy is not None
    assert eight is not None
    one = fit(footprint(seventy), Machine(gpu("h100")))
    assert not one.fits
    assert one.tokens == 0
    assert one.kv_gib == pytest.approx(79.65 * 0.9 - 3 - 131.42, abs=0.01)
    assert one.reason == "131.42 GiB of weights do not fit on 1x H100 80GB HBM3: 62.7 GiB short; 2 of them would do"
    assert fit(footprint(seventy), Machine(gpu("h100"), 2)).kv_gib > 0

    short = fit(footprint(eight), Machine(gpu("l4")), max_model_len=131_072)
    assert not short.fits
    assert 0 < short.tokens < 131_072
    assert f"--max-model-len {short.tokens} would start" in short.reason
    assert fit(footprint(eight), Machine(gpu("l4")), max_model_len=short.tokens).fits


def test_a_draft_over_its_share_is_refused_and_told_with_its_cost() -> None:
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


def test_a_draft_that_alone_makes_it_too_large() -> None:
    reason = fit(Footprint(30.0, 128.0, draft_gib=10.0), Machine(gpu("l40s"))).reason
    assert reason.endswith("though the target alone would fit")


def test_machines_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least one GPU"):
        Machine(gpu("h100"), tensor_parallel=0)
    with pytest.raises(ValueError, match="utilization"):
        Machine(gpu("h100"), utilization=1.2)
