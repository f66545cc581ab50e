"""The calibrations of the package, and simulated engines with them."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from backends.calibration.calibration import Kind
from backends.calibration.files import calibration_names, paths_from
from backends.calibration.load import load_calibration
from backends.speculation import Method

H100 = "llama-3.1-8b-h100"


def document() -> dict[str, object]:
    dumped: dict[str, object] = yaml.safe_load(load_calibration(H100).model_dump_json())
    return dumped


@pytest.mark.parametrize("name", calibration_names())
def test_all_calibrations_load_and_have_all_methods(name: str) -> None:
    calibration = load_calibration(name)
    assert calibration.name == name
    assert set(calibration.methods) == set(Method)
    for method in Method:
        assert calibration.kv_tokens(method) >= calibration.scheduler.max_model_len // 8
        if method not in (Method.BASELINE, Method.NGRAM, Method.SUFFIX):
            assert all(calibration.acceptance(method, kind).by_position for kind in Kind)


def written(path: Path, text: str = "", **changed: object) -> str:
    path.write_text(text or yaml.safe_dump(document() | changed))
    return str(path)


def test_a_calibration_is_named_by_its_path_too_and_takes_methods_from_another(tmp_path: Path) -> None:
    other = document()["methods"]
    assert isinstance(other, dict)
    written(tmp_path / "theirs.yaml", methods={**other, "eagle": {**other["eagle"], "weights_gib": 7.5}})
    methods = {"baseline": {"drafting": {"source": "drafts nothing"}}}
    own = written(tmp_path / "own.yaml", methods=methods, methods_from="theirs.yaml", hardware="mine")
    with paths_from(tmp_path):
        mine = load_calibration("own.yaml")
    assert (mine.hardware, mine.name) == ("mine", own)
    assert load_calibration(own) is mine
    assert mine.methods[Method.EAGLE].weights_gib == 7.5
    taken = {"taken_from": str(tmp_path / "theirs.yaml")}
    assert mine.methods[Method.EAGLE3] == load_calibration(H100).methods[Method.EAGLE3].model_copy(update=taken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "changed", "message"),
    [
        ("", {"target": 3}, r"line \d+: target: expected text"),
        ("", {"hardwear": "x"}, r"line \d+: hardwear: unknown key; did you mean 'hardware'\?"),
        ("", {"temperature": {"temperatures": [0, 1], "factors": [1], "source": "x"}}, "with one of factors for each"),
        ("", {"temperature": {"temperatures": [1, 0], "factors": [1, 1], "source": "x"}}, "temperatures must ascend"),
        ("", {"methods": {"mtp": {"drafting": {"source": "x"}, "acceptance_like": "eagle"}}}, "eagle has no accept"),
        ("", {"methods": {"mtp": {"drafting": {"source": "x"}, "context": "mpt"}}}, "mpt.*; did you mean 'mtp'"),
        ("", {"methods_from": "bad.yaml"}, "leads back to it"),
        ("", {"methods_from": "llama-3.1-8b-h100" + "@H200" * 2000}, "is called 'llama-3.1-8b-h100@H200"),
        ("", {"methods_from": "no-such"}, "no calibration is called 'no-such'; known here: apertus"),
        ("step: [\n", {}, "line 2: not YAML: "),
        ("- 1\n", {}, "expected a mapping"),
        ("#" * (1 << 20) + "!", {}, "larger than 1 MiB"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"{x}: &{x} [*{y}, *{y}, *{y}, *{y}, *{y}, *{y}, *{y}, *{y}]\n" for y, x in pairwise("abcdefgh")
        ), {}, "too large, with its aliases"),
    ],
)  # fmt: skip
def test_what_is_no_calibration_is_refused_with_the_reason(
    tmp_path: Path, text: str, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_calibration(written(tmp_path / "bad.yaml", text, **changed))


def test_a_file_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, message in (
        ("pipe", "cannot read the calibration: not a regular file"),
        ("none", "cannot read the calibration: No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            load_calibration(str(tmp_path / f"{name}.yaml"))


def test_the_weights_of_a_draft_reduce_the_kv_cache() -> None:
    calibration = load_calibration(H100)
    assert calibration.kv_tokens(Method.DRAFT_MODEL) < calibration.kv_tokens(Method.EAGLE)
    assert calibration.kv_tokens(Method.EAGLE) < calibration.kv_tokens(Method.BASELINE)
    crowded = calibration.model_copy(update={"memory": calibration.memory.model_copy(update={"weights_gib": 100.0})})
    with pytest.raises(ValueError, match="no memory is left"):
        crowded.kv_tokens(Method.BASELINE)


def test_what_was_not_measured_is_said_once() -> None:
    known = load_calibration("llama-3.1-8b-h100@L40S")
    measured, premise = known.premises([Method.BASELINE, Method.SUFFIX, Method.SUFFIX, Method.EAGLE3])
    assert premise.startswith("What a step takes longer with suffix was not measured for llama-3.1-8b-h100@L40S: ")
    assert "0.04 to 3 ms" in premise
    assert measured.startswith("llama-3.1-8b-h100@L40S is meta-llama/Llama-3.1-8B-Instruct in bf16 on 1x L40S, ")
    assert "measured with vLLM 0.10.1.1, scaled from H100 in bf16; its error on other figures is not known" in measured
    *_, taken, suffix = load_calibration("llama-3.1-8b-h100-024").premises([Method.DRAFT_MODEL, Method.SUFFIX])
    assert taken.endswith("of draft_model were not measured for llama-3.1-8b-h100-024: they are llama-3.1-8b-h100's.")
    assert "elsewhere it was 0.87 to 6 ms, and 2.81 ms is taken" in suffix
    theirs = load_calibration(H100).acceptance(Method.EAGLE3, Kind.CHAT)
    assert load_calibration("llama-3.1-8b-h100-024").acceptance(Method.EAGLE3, Kind.CHAT) == theirs
    measured, drafts = load_calibration("h200/llama-3.1-70b/fp8").premises([Method.BASELINE, Method.EAGLE3])
    assert drafts.startswith("Drafting times and acceptance of eagle3 were not measured for h200/llama-3.1-70b/fp8: ")
    assert drafts.endswith(" they are llama-3.1-70b-4xh100's.")
    assert "in fp8 on 1x H200, measured with vllm, version not stated; off by 1.3% in the median, " in measured
    assert "another GPU: 16.2%, up to 369%" in measured
