"""`gateway replay` on the command line: table, figures, page and exit statuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from tests.lab import invoked
from tests.lab.pool import pool_of
from tests.support.paths import DATA
from tests.support.report import ReportPage

AZURE, MOONCAKE = DATA / "AzureLLMInferenceTrace_code.csv", DATA / "mooncake_synthetic_trace.jsonl"
TIMES = ("e2e_s", "ttft_s", "tpot_s")
POOL = pool_of("{name: thresholds, seed: 1}", "plain", "tree", "head")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "pool.yaml"
    path.write_text(POOL)
    return path


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "untimed.jsonl"
    acceptance = [{"suffix": 6.0, "eagle3": 1.5}, {"suffix": 1.2, "eagle3": 3.0}]
    kinds = [
        TraceRecord(temperature=0.0, output_tokens=60, template=2 * f"{kind:04x}", acceptance=acceptance[kind])
        for kind in range(2)
    ]
    write_trace(path, [replace(kinds[n % 2], prompt_tokens=100 + n % 50) for n in range(200)])
    return path


run = partial(invoked.run, "replay")


def figures(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    return invoked.figures("replay", tmp_path, *arguments)[1]


def test_the_table_the_figures_and_the_page_agree(pool: Path, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    given = ("--policy", "thresholds", "--policy", "oracle", "--warmup", 5, "--report", report)
    printed, document = invoked.figures("replay", tmp_path, AZURE, "--config", pool, *given)
    assert printed.startswith(
        "Step times of plain, tree, head: llama-3.1-8b-h100. llama-3.1-8b-h100 is meta-llama/Llama-3.1-8B-Instruct in "
    )
    assert "measured with vLLM 0.10.1.1; its error on other figures is not known." in printed
    assert "What a step takes longer with suffix was not measured for llama-3.1-8b-h100" in printed
    assert (
        "\n\nthresholds is alone: nobody to compare. How far this is off is not known: the trace has no times of these "
        "replicas.\n35 requests on simulated replicas\n"
    ) in printed
    assert list(document["policies"]) == ["thresholds", "oracle"]
    for one in document["policies"].values():
        promised = {"requests", "e2e_s", "ttft_s", "tpot_s", "output_tokens_per_s", "shares", "goodput"}
        assert set(one) == promised | {"errors", "slo_kept"}
        for name in TIMES:
            assert list(one[name]) == ["mean", "p50", "p90", "p99"]
            assert 0 < one[name]["p50"] <= one[name]["p90"] <= one[name]["p99"]
        assert (one["requests"], one["errors"]) == (35, 0)
        assert set(one["shares"]) == {"plain", "tree", "head"}
        assert sum(one["shares"].values()) == pytest.approx(1.0)
    page = ReportPage(report.read_text("utf-8"))
    assert "thresholds is alone" in page.text  # the oracle does not compete
    assert page.headings == ["Against thresholds", "Distributions"]
    counts, times = page.tables["policy"], page.tables["Time to finish, seconds"]
    assert counts[0] == ["policy", "requests", "errors", "tokens/s", "share of each backend"]
    for row, spent, (name, one) in zip(counts[1:], times[1:], document["policies"].items(), strict=True):
        assert row[:3] == [name, "35", "0"]
        assert row[-1] == "  ".join(f"{backend} {share:.0%}" for backend, share in one["shares"].items())
        assert spent == [name, "35", *(f"{one['e2e_s'][which]:.3f}" for which in one["e2e_s"])]


def test_a_long_replay_says_how_to_get_intervals(pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (AZURE, "--config", pool, "--policy", "random", "--policy", "round_robin")
    hint = "Intervals for so many requests take a while: --replications 6 makes them."
    assert hint not in run(*given)[1]
    monkeypatch.setattr("lab.statistics._FEW_REQUESTS", 100)
    assert hint in run(*given)[1]


def test_requests_that_no_replica_serves_are_said_to_be_in_no_figure(pool: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    sizes = [100, 200_000]
    write_trace(trace, [TraceRecord(arrived_at=float(n), prompt_tokens=n, output_tokens=9) for n in sizes])
    printed, document = invoked.figures("replay", tmp_path, trace, "--config", pool)
    assert printed.count("\n1 requests are in no figure: with prompt and answer they are longer than") == 1
    assert len(document["assumed"]) == 3


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_also_in_parallel_processes(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (MOONCAKE, "--config", pool, "--policy", "random", "--policy", "learned", "--warmup", 3)
    alone = figures(tmp_path, *given)
    with monkeypatch.context() as patch:
        patch.setattr("lab.replay.play.MIN_PARALLEL_REQUESTS", 0)
        patch.setattr("os.sched_getaffinity", lambda _: {0, 1})
        assert figures(tmp_path, *given) == alone
    assert figures(tmp_path, *given, "--seed", 5)["policies"] != alone["policies"]


@pytest.mark.slow
def test_rate_and_speed_set_the_pace(pool: Path, tmp_path: Path) -> None:
    given = (AZURE, "--config", pool, "--policy", "least_loaded")
    own = figures(tmp_path, *given)["policies"]["least_loaded"]
    fast = figures(tmp_path, *given, "--speed", 10)["policies"]["least_loaded"]
    assert fast["output_tokens_per_s"] == pytest.approx(
        10 * own["output_tokens_per_s"], rel=0.2
    )  # plus the time to finish the last requests
    assert fast["e2e_s"]["mean"] > own["e2e_s"]["mean"]
    at_rate = figures(tmp_path, *given, "--rate", 4)["policies"]["least_loaded"]
    assert at_rate["goodput"] == pytest.approx(4.0, rel=0.1)


def test_goodput_counts_the_requests_that_keep_their_bounds(pool: Path, tmp_path: Path) -> None:
    given = (AZURE, "--config", pool, "--policy", "least_loaded")
    all_kept = figures(tmp_path, *given)["policies"]["least_loaded"]
    assert all_kept["slo_kept"] == 1.0
    bound = all_kept["e2e_s"]["p50"]
    half = figures(tmp_path, *given, "--slo", f"e2e={bound},ttft=60")["policies"]["least_loaded"]
    assert half["slo_kept"] == pytest.approx(0.5)
    assert half["goodput"] == pytest.approx(all_kept["goodput"] / 2)


@pytest.mark.slow
def test_a_trace_without_times_needs_a_rate(pool: Path, untimed: Path, tmp_path: Path) -> None:
    assert (
        invoked.refused("replay", untimed, "--config", pool)
        == "gateway replay: the trace has no arrival times; give --rate\n"
    )
    some = tmp_path / "some.jsonl"
    times = [None if n == 3 else float(n) for n in range(9)]
    write_trace(some, [TraceRecord(prompt_tokens=9, arrived_at=at_s) for at_s in times])
    assert "1 of 9 requests have no arrival time; give --rate" in run(some, "--config", pool)[2]
    for at, said in ((None, "2 of 2 sessions have no time at which they begin"), (5.0, "all 2 sessions begin at the")):
        turns = [TraceRecord(arrived_at=at, session=one, prompt_tokens=9, think_time_s=1.0) for one in "aabb"]
        write_trace(some, turns)
        assert said in run(some, "--config", pool)[2]
    given = (untimed, "--config", pool, "--policy", "least_loaded", "--rate", 5)
    assert figures(tmp_path, *given)["policies"]["least_loaded"]["goodput"] == pytest.approx(5.0, rel=0.2)
    assert figures(tmp_path, AZURE, "--config", pool, "--limit", 1)["requests"] == 1  # a single request needs no rate


@pytest.mark.slow
def test_policies_of_the_same_name_are_numbered(pool: Path, tmp_path: Path) -> None:
    given = ("{name: static, backend: head}", "oracle", "{name: static, backend: tree}")
    options = [word for policy in given for word in ("--policy", policy)]
    by_policy = figures(tmp_path, MOONCAKE, "--config", pool, *options)["policies"]
    assert list(by_policy) == ["static", "oracle", "static (2)"]
    assert by_policy["static"]["shares"]["head"] == by_policy["static (2)"]["shares"]["tree"] == 1.0
    assert list(figures(tmp_path, MOONCAKE, "--config", pool)["policies"]) == ["thresholds"]  # the pool's own


def test_the_pool_file_sets_the_context_of_its_replicas(tmp_path: Path) -> None:
    pool, trace = tmp_path / "pool.yaml", tmp_path / "trace.jsonl"
    lengths = [500, 1000, 5000, 9000]
    write_trace(trace, [TraceRecord(arrived_at=float(n), prompt_tokens=n, output_tokens=5) for n in lengths])
    counted = []
    for given in ("", ", max_model_len: 1004", ", max_model_len: 8192"):
        simulate = "{calibration: llama-3.1-8b-h100" + given + "}"
        pool.write_text(
            "models: {m: {policy: {name: random}, backends: {a: {method: baseline, simulate: " + simulate + "}}}}\n"
        )
        one = figures(tmp_path, trace, "--config", pool)["policies"]["random"]
        counted.append((one["errors"], one["slo_kept"]))
    assert counted == [(0, 1.0), (3, 0.25), (1, 0.75)], "what fails keeps no bounds"


def test_an_empty_file_does_not_hide_the_others(pool: Path, tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / "requests-1.jsonl").touch()
    assert run(folder, "--config", pool) == (2, "", "gateway replay: the trace has no requests\n")
    write_trace(folder / "requests-2.jsonl", [TraceRecord(arrived_at=float(n), prompt_tokens=9) for n in range(3)])
    assert figures(tmp_path, folder, "--config", pool)["requests"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "rondom"], "--policy rondom: name: no such policy; did you mean 'random'?"),
        (["--policy", "{name: static}"], "static takes either `backend: NAME` or `method: METHOD`"),
        (["--model", "qwen"], "has no model 'qwen'; it has llama"),
        (["--warmup", "30"], "the trace has 30 requests; --warmup 30 leaves none to count"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(pool: Path, options: list[str], message: str) -> None:
    assert message in invoked.refused("replay", MOONCAKE, "--config", pool, *options)
