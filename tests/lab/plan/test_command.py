"""`gateway plan` on the command line: output, pool file, commands and exit statuses."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from backends.memory.catalogue import gpu
from backends.memory.estimate import Machine
from backends.validation import UsageError
from gateway.cli.app import app
from gateway.config.load import load_pool
from lab.parallel import all_cores, ray_cluster, report_progress
from lab.trace import TraceRecord, write_trace
from tests.support.report import ReportPage

POOL = """\
models:
  llama:
    policy: {name: least_loaded, seed: 1}
    backends:
      plain: {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
      lookup:
        method: ngram
        simulate: {calibration: llama-3.1-8b-h100}
        speculative_config: {num_speculative_tokens: 4, prompt_lookup_max: 3}
"""
FEW = ("--method", "baseline", "--method", "eagle3=3", "--no-schedules", "--jobs", 1, "--seeds", 1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(
        path,
        [
            TraceRecord(
                arrived_at=0.2 * number, temperature=0.0, workload="chat", prompt_tokens=100 + number % 400,
                output_tokens=50 + number % 90,
            )
            for number in range(800)
        ],
    )  # fmt: skip
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_best_mix_is_printed_with_its_gain_and_memory_fit(trace: Path, tmp_path: Path) -> None:
    pool, out, figures = tmp_path / "pool.yaml", tmp_path / "plan.yaml", tmp_path / "plan.json"
    pool.write_text(POOL)
    code, printed, _ = run(trace, "--replicas", 2, "--config", pool, *FEW, "--out", out, "--json", figures)
    assert code == 0
    assert "2x eagle3 k=3" in printed
    assert "the plan, best of one kind" in printed
    assert "present" in printed
    assert "To change: 1x baseline, 1x ngram k=4 -> 2x eagle3 k=3." in printed
    assert "eagle3 k=3: 15.75 GiB of weights (0.79 of the draft)" in printed
    (plan,) = orjson.loads(figures.read_bytes())["plans"]
    assert plan["chosen"] == "2x eagle3 k=3"
    present = next(one for one in plan["mixes"] if one["is"] == "present")
    assert present["mix"] == "1x baseline, 1x ngram k=4"
    assert 0 < present["loss"]["low"] < present["loss"]["value"] < present["loss"]["high"]
    assert present["worse_in"] == 1.0
    assert plan["verdict"].startswith("Run 2x eagle3 k=3: ")
    assert plan["verdict"] in printed
    assert "They leave out its own error" in printed
    draft = next(kind for kind in plan["kinds"] if kind["method"] == "eagle3")
    assert draft["fit"]["fits"]
    assert draft["fit"]["tokens"] > 400_000

    made = load_pool(out).models["llama"]
    assert made.policy.name == "least_loaded"
    assert list(made.backends) == ["eagle3-k3-1", "eagle3-k3-2"]
    served = made.backends["eagle3-k3-2"].serve
    assert served is not None
    assert served.env == {"CUDA_VISIBLE_DEVICES": "1"}
    config = made.backends["eagle3-k3-2"].speculative_config
    assert config is not None
    assert (config.model, config.num_speculative_tokens) == ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 3)
    commands = [shlex.split(line) for line in printed.splitlines() if "vllm serve" in line]
    assert len(commands) == 2
    for words in commands:
        assert words[1:4] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
        spec = orjson.loads(words[words.index("--speculative-config") + 1])
        assert spec == {"method": "eagle3", "num_speculative_tokens": 3, "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}


def test_the_plan_can_be_tried_on_simulated_replicas(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    code, *_ = run(trace, "--replicas", 1, "--calibration", "llama-3.1-8b-h100", *FEW, "--out", out, "--simulate")
    assert code == 0
    (backend,) = load_pool(out).models["meta-llama/Llama-3.1-8B-Instruct"].backends.values()
    assert backend.simulate is not None
    assert backend.simulate.calibration == "llama-3.1-8b-h100"


def test_a_plan_for_several_gpus_with_an_slo(trace: Path, tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    code, printed, _ = run(
        trace, "--replicas", 1, "--calibration", "llama-3.1-8b-h100", *FEW, "--gpu", "h200", "--gpu", "L40S",
        "--slo", "ttft=0.5,tpot=0.006", "--json", figures, "--report", tmp_path / "plan.html",
    )  # fmt: skip
    assert code == 0
    assert "SLO kept" in printed
    h200, l40s = orjson.loads(figures.read_bytes())["plans"]
    assert (h200["calibration"], l40s["calibration"]) == ("llama-3.1-8b-h200", "llama-3.1-8b-l40s")
    assert max(one["value"] for one in l40s["mixes"]) < max(one["value"] for one in h200["mixes"])
    page = ReportPage((tmp_path / "plan.html").read_text("utf-8"))
    for machine, plan in (("1x H200 141GB", h200), ("1x L40S 48GB", l40s)):
        shown = page.tables[f"Mixes on {machine}"]
        assert [row[0] for row in shown[1:]] == [one["mix"] for one in plan["mixes"]]
        assert [row[5] for row in shown[1:]] == [f"{one['value']:.1%}" for one in plan["mixes"]]
        assert f"What to run on {machine}" in page.headings
        assert plan["verdict"] in page.text
    assert "vllm serve" in page.text


def test_the_status_is_1_if_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is patched, since no GPU with known step times is too small for its target."""
    monkeypatch.setattr("lab.plan.command.machine_of", lambda *_: Machine(gpu("l4")))
    path, out = tmp_path / "long.jsonl", tmp_path / "plan.yaml"
    write_trace(path, [TraceRecord(arrived_at=float(n), prompt_tokens=60_000, output_tokens=10) for n in range(20)])
    code, printed, _ = run(path, "--replicas", 2, "--calibration", "llama-3.1-8b-h100", *FEW, "--out", out)
    assert code == 1
    assert "Nothing fits:\n" in printed
    assert "less than one request of 60,010" in printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--calibration: name the target model and GPU"),
        (["--calibration", "llama"], "no calibration is called 'llama'"),
        (
            ["--calibration", "llama-3.1-8b-h100", "--gpu", "b200"],
            "no step times of meta-llama/Llama-3.1-8B-Instruct on b200",
        ),
        (["--calibration", "llama-3.1-8b-h100", "--gpu", "h10"], "no such GPU: 'h10'"),
        (["--calibration", "llama-3.1-8b-h100", "--slo", "ttft=fast"], "write it as ttft=0.5"),
        (["--calibration", "llama-3.1-8b-h100", "--slo", "itl=1"], "unknown bound 'itl'"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "eagel"], "unknown method 'eagel'"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "mtp"], "no acceptance and draft of mtp are published"),
        (["--calibration", "llama-3.1-8b-h100", "--method", "eagle=x"], "write k as eagle=2,3,5"),
        (["--calibration", "llama-3.1-8b-h100", "--policy", "rondom"], "did you mean 'random'?"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(trace: Path, options: list[str], message: str) -> None:
    code, printed, error = run(trace, "--replicas", 2, "--jobs", 1, *options)
    assert (code, printed) == (2, "")
    assert message in error


def _square(number: int) -> int:
    report_progress(number)
    return number * number


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_all_cores_returns_results_in_order_and_reports_progress(jobs: int) -> None:
    reported: list[int] = []
    with all_cores(_square, jobs, reported.append) as run_all:
        assert run_all(range(20)) == [number * number for number in range(20)]
        assert sum(reported) == sum(range(20))
        assert run_all([7]) == [49]
    assert sum(reported) == sum(range(20)) + 7


def test_the_same_trace_gives_the_same_figures(trace: Path, tmp_path: Path) -> None:
    """The default policy breaks ties at random and has no seed in its settings."""
    out = [tmp_path / name for name in ("first.json", "second.json")]
    for path in out:
        run(trace, "--replicas", 2, "--calibration", "llama-3.1-8b-h100", *FEW, "--json", path)
    assert out[0].read_bytes() == out[1].read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # from Ray
def test_a_local_ray_gives_the_same_plan(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="an extra")
    given = (trace, "--replicas", 1, "--calibration", "llama-3.1-8b-h100", *FEW, "--limit", 200)
    assert run(*given, "--ray", "local", "--json", tmp_path / "ray.json")[0] == 0
    assert run(*given, "--json", tmp_path / "here.json")[0] == 0
    assert (tmp_path / "ray.json").read_bytes() == (tmp_path / "here.json").read_bytes()


def test_an_unreachable_ray_cluster_is_reported() -> None:
    pytest.importorskip("ray", reason="an extra")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free once it is closed
    with pytest.raises(UsageError, match=f"--ray 127.0.0.1:{port}: no answer"):
        ray_cluster(_square, f"127.0.0.1:{port}").__enter__()
