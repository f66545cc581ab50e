"""`gateway plan` on the command line: output, pool file, commands and exit statuses."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from backends.calibration.load import load_calibration
from gateway.config.load import load_pool
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from tests.lab import invoked
from tests.lab.pool import pool_of

POOL = pool_of("{name: least_loaded, seed: 1}", "plain", "lookup")
FEW = ("--method", "baseline", "--method", "eagle3=3", "--jobs", 1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    chat = TraceRecord(temperature=0.0, workload="chat", acceptance={"eagle3": 3.0})
    sizes: list[dict[str, Any]] = [
        {"prompt_tokens": 100 + number % 400, "output_tokens": 50 + number % 90} for number in range(800)
    ]
    write_trace(path, [replace(chat, arrived_at=0.2 * number, **each) for number, each in enumerate(sizes)])
    return path


run = partial(invoked.run, "plan")
figures = partial(invoked.figures, "plan")


@pytest.mark.slow
def test_the_best_mix_is_printed_with_its_gain_and_memory_fit(trace: Path, tmp_path: Path) -> None:
    pool, out = tmp_path / "pool.yaml", tmp_path / "plan.yaml"
    pool.write_text(POOL)
    printed, plan = figures(tmp_path, trace, "--replicas", 2, "--config", pool, *FEW, "--out", out)
    assert "2x eagle3 k=3" in printed
    assert "the plan, best of one kind" in printed
    assert "To change: 1x baseline, 1x ngram k=4 -> 2x eagle3 k=3." in printed
    assert "eagle3 k=3: 15.75 GiB of weights (0.79 of the draft)" in printed
    assert plan["chosen"] == "2x eagle3 k=3"
    present = next(one for one in plan["mixes"] if one["is"] == "present")
    assert present["mix"] == "1x baseline, 1x ngram k=4"
    assert 0 < present["loss"]["low"] < present["loss"]["value"] < present["loss"]["high"]
    assert present["worse_in"] == 1.0
    assert plan["verdict"].startswith("Run 2x eagle3 k=3: ")
    assert plan["verdict"] in printed
    assert "--max-model-len" not in printed  # the engine's own; the longest request of a trace says nothing of it
    assert "They leave out its own error" in printed
    draft = next(kind for kind in plan["kinds"] if kind["method"] == "eagle3")
    assert draft["fit"]["fits"]
    assert draft["fit"]["tokens"] > 400_000

    made = load_pool(out).models["llama"]
    assert made.policy.name == "least_loaded"
    assert list(made.backends) == ["eagle3-k3-1", "eagle3-k3-2"]
    served, config = made.backends["eagle3-k3-2"].serve, made.backends["eagle3-k3-2"].speculative_config
    assert served is not None
    assert config is not None
    assert served.env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert served.flags == ["--gpu-memory-utilization", "0.9"]
    assert (config.model, config.num_speculative_tokens) == ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 3)
    commands = [shlex.split(line) for line in printed.splitlines() if "vllm serve" in line]
    assert len(commands) == 2
    for words in commands:
        assert words[1:4] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
        spec = orjson.loads(words[words.index("--speculative-config") + 1])
        assert spec == {"method": "eagle3", "num_speculative_tokens": 3, "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}


@pytest.mark.slow
def test_a_plan_with_an_slo(trace: Path, tmp_path: Path) -> None:
    given = (trace, "--replicas", 1, *FEW, "--slo", "ttft=0.5,tpot=0.006", "--calibration", "llama-3.1-8b-h200")
    printed, plan = figures(tmp_path, *given)
    assert "SLO kept" in printed
    assert plan["calibration"] == "llama-3.1-8b-h200"
    assert all(0.0 < one["value"] <= 1.0 for one in plan["mixes"])


def test_the_status_is_1_if_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is patched, since no GPU with known step times is too small for its target."""
    known = load_calibration("llama-3.1-8b-h100")
    small = known.model_copy(update={"memory": known.memory.model_copy(update={"gpu_gib": 24.0})})
    monkeypatch.setattr("lab.plan.command.load_calibration", lambda _: small)
    path, out = tmp_path / "long.jsonl", tmp_path / "plan.yaml"
    write_trace(path, [TraceRecord(arrived_at=float(n), prompt_tokens=60_000, output_tokens=10) for n in range(20)])
    code, printed, _ = run(path, "--replicas", 2, "--calibration", "llama-3.1-8b-h100", *FEW, "--out", out)
    assert code == 1
    assert printed.startswith("Nothing fits.\n")
    assert "less than one request of 60,010" in printed
    assert not out.exists()


def test_without_a_pool_requests_have_the_default_temperature_of_the_target(tmp_path: Path) -> None:
    path = tmp_path / "without.jsonl"
    write_trace(path, [TraceRecord(arrived_at=float(n), prompt_tokens=9, output_tokens=9) for n in range(20)])
    given = (path, "--replicas", 1, "--method", "baseline", "--jobs", 1)
    code, printed, error = run(*given, "--calibration", "llama-3.1-8b-h100")
    assert code == 0, error
    assert "at temperature 0.6 where none is recorded (20)" in printed


def test_methods_that_do_not_fit_are_no_error(trace: Path) -> None:
    code, printed, _ = run(trace, "--replicas", 2, "--calibration", "llama-3.1-70b-4xh100@L4", "--limit", 20)
    assert (code, printed.partition("\n")[0]) == (1, "Nothing fits.")
    assert "baseline: 131.40 GiB of weights do not fit on 4x L4: 62.4 GiB short" in printed


def test_what_a_shortened_context_refuses_is_said_and_not_planned(trace: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    draft = "{method: draft_model, url: 'http://127.0.0.1:9', drafter_limit: 400, speculative_config: "
    draft += "{num_speculative_tokens: 3, model: org/draft}}"
    pool.write_text(POOL + f"      draft: {draft}\n")
    given = (trace, "--replicas", 3, "--config", pool, "--calibration", "llama-3.1-8b-h100", "--limit", 140)
    printed, plan = figures(tmp_path, *given, "--method", "baseline", "--budget", 5, "--jobs", 1)
    (kind,) = [each for each in plan["kinds"] if each["method"] == "draft_model"]
    assert not kind["fit"]["fits"]
    said = kind["fit"]["reason"].partition("; from vLLM 0.33 on its draft shortens its context to 400 tokens; ")[2]
    refused, total = map(int, re.findall(r"\d+", said))
    assert said == f"it refuses {refused} of {total} requests"
    assert 0.4 * total < refused < 0.6 * total, "of the trace, 48% are longer"
    assert "it refuses" in printed
    assert "draft_model" not in plan["chosen"]
    assert "1x draft_model k=3" in next(one["mix"] for one in plan["mixes"] if "present" in one["is"])


def test_a_present_mix_of_more_replicas_is_no_rival_and_methods_not_tried_are_said(trace: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    given = (trace, "--replicas", 1, "--config", pool, "--method", "baseline", "--method", "mtp=1", "--jobs", 1)
    printed, plan = figures(tmp_path, *given, "--limit", 140)
    labels = {one["mix"]: one["is"] for one in plan["mixes"]}
    assert labels["1x baseline, 1x ngram k=4"] == "present, with 2 replicas"
    assert "No mix of several methods was tried." in plan["verdict"]
    assert plan["not_tried"] == ["mtp"]
    assert "Not tried: mtp. No acceptance and draft are published for meta-llama/Llama-3.1-8B-Instruct." in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--calibration: name the target model and GPU"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "eagel"], "unknown method 'eagel'"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "mtp"], "no acceptance and draft of mtp are published"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "eagle=x"], "write k as eagle=2,3,5"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "eagle=2,900"], "k is from 1 to 128"),
        (["--calibration", "llama-3.1-8b-h100", "--policy", "rondom"], "did you mean 'random'?"),
        (["--calibration", "llama-3.1-8b-h100@B2"], "no data sheet of a GPU 'B2'; known: A10"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(trace: Path, options: list[str], message: str) -> None:
    assert message in invoked.refused("plan", trace, "--replicas", 2, "--jobs", 1, *options)
