"""`gateway bench` on the command line, against scripted servers and simulated replicas."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from tests.lab import invoked
from tests.support.command import ROOT, alive, ended, family, start, until
from tests.support.stepping_engine import SteppingEngine
from tests.support.upstream import Upstream, Wire
from tests.support.waiting import stays

POOL = """
models:
  m:
    policy: {name: round_robin}
    backends:
      head:
        method: eagle3
        simulate: {calibration: llama-3.1-8b-h100}
        speculative_config: {num_speculative_tokens: 3}
      plain: {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
"""


def words(tokens: int, per_step: int = 1) -> SteppingEngine:
    """Return an engine whose prompts have ten tokens more than words."""
    return SteppingEngine(per_step, tokens=tokens, prompt_tokens=None)


def _from_to(each: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    return each["sent_s"], [sent + e2e for sent, e2e in zip(each["sent_s"], each["e2e_s"], strict=True)]


async def run_bench(*arguments: object) -> tuple[int, str, str]:
    return await ended(await start("bench", *arguments))


@pytest.mark.slow
async def test_endpoints_are_measured_at_each_rate_and_temperature_and_compared(tmp_path: Path) -> None:
    async with Upstream("a", "m", words(12)) as plain, Upstream("b", "m", words(12, per_step=3)) as mine:
        status, out, err = await run_bench(
            *("--url", f"baseline={plain.url}/v1", "--url", f"mine={mine.url}", "--rate", "100,200"),
            *("--num-requests", "20", "--seed", "3"),
            *("--warmup", "3", "--input-tokens", "100-120", "--output-tokens", "12", "--temperature", "0,0.5"),
            *("--api-key", "secret-key", "--json", str(tmp_path / "r.json")),
        )
    assert status == 0, err
    asked = [[seen.json for seen in server.seen if seen.json["stream"]] for server in (plain, mine)]
    assert {seen.header("authorization") for seen in plain.seen} == {"Bearer secret-key"}
    assert [sum(one["temperature"] == t for one in asked[0]) for t in (0, 0.5)] == [40, 40]
    texts = [[one["messages"][0]["content"] for one in each] for each in asked]
    assert sorted(texts[0]) == sorted(texts[1])  # both get the same prompts, and each run its own
    assert len(set(texts[0])) == 80
    assert {len(text.split()) for text in texts[0]} <= set(range(90, 111))  # by this server's token count
    report = json.loads((tmp_path / "r.json").read_text())
    keys = [(run["target"], run["temperature"], run["rate"]) for run in report["runs"]]
    assert keys == [(name, t, rate) for name in ("baseline", "mine") for t in (0.0, 0.5) for rate in (100.0, 200.0)]
    for run in report["runs"]:
        assert (run["model"], run["requests"], run["errors"]) == ("m", 17, 0)
        assert run["e2e_s"]["p50"] >= run["ttft_s"]["p50"] > 0
        assert run["itl_s"]["mean"] > 0
        assert (run["speedup"] is None) == (run["target"] == "baseline")
        assert run["speedup"] is None or run["speedup"]["baseline"] == "baseline"
    assert len(re.findall(r"^[12]00 requests/s, temperature 0(\.5)?: ", out, re.MULTILINE)) == 4  # who won
    assert "secret-key" not in out + err + (tmp_path / "r.json").read_text()


@pytest.mark.slow
async def test_the_replicas_of_a_pool_are_compared_with_its_baseline_at_each_k(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    status, out, err = await run_bench(
        *("--config", str(pool), "--rate", "20", "--num-requests", "12", "--temperature", "0", "--k", "1,3"),
        *("--input-tokens", "64", "--output-tokens", "48", "--ignore-eos"),
        *("--json", str(tmp_path / "r.json")),
    )
    assert status == 0, err
    runs = {run["target"]: run for run in json.loads((tmp_path / "r.json").read_text())["runs"]}
    assert list(runs) == ["plain", "head k=1", "head k=3"]  # the baseline first, once
    for name, run in runs.items():
        assert (run["requests"], run["simulated"]) == (12, True)
        assert not any("of the trace's tokens" in note for note in run["notes"])
        assert run["k"] == {"plain": 0, "head k=1": 1, "head k=3": 3}[name]
    assert (runs["plain"]["acceptance"]["tokens_per_step"], runs["plain"]["speedup"]) == (1.0, None)
    for k in (1, 3):
        run = runs[f"head k={k}"]
        assert len(run["acceptance"]["by_position"]) == k
        assert 1 < run["acceptance"]["tokens_per_step"] <= k + 1
        gain = run["speedup"]["tpot"]
        assert run["speedup"]["baseline"] == "plain"
        assert gain["value"] == pytest.approx(runs["plain"]["tpot_s"]["mean"] / run["tpot_s"]["mean"])
        assert gain["low"] is None or gain["low"] <= gain["value"] <= gain["high"]
    assert "Simulated: plain, head k=1, head k=3." in out


@pytest.mark.slow
async def test_closed_loops_keep_so_many_requests_under_way(tmp_path: Path) -> None:
    async with Upstream("a", "m", words(12)) as server:
        status, out, err = await run_bench(
            *("--url", f"baseline={server.url}", "--concurrency", "1,3", "--num-requests", "9"),
            *("--input-tokens", "20", "--output-tokens", "12", "--json", str(tmp_path / "r.json")),
        )
    assert status == 0, err
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [(run["concurrency"], run["rate"]) for run in runs] == [(1, None), (3, None)]
    for run in runs:
        sent, ended = (sorted(times) for times in _from_to(run["each"]))
        under_way = [sum(at < other for at in sent) - sum(at <= other for at in ended) for other in ended]
        assert max(under_way) < run["concurrency"] + 1
        assert all(later >= end for later, end in zip(sent[run["concurrency"] :], ended, strict=False))
        assert run["each"]["steps"] == [12] * 9
    assert "3 requests at once" in out


@pytest.mark.slow
async def test_the_requests_of_a_trace_are_sent_at_its_pace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRecord(arrived_at=n / 50, prompt=f"once {n}", output_tokens=4) for n in range(6)])
    async with Upstream("a", "m", words(4)) as server:
        status, out, err = await run_bench("--url", server.url, "--trace", str(trace), "--num-requests", "5")
    assert status == 0, err
    streamed = [seen for seen in server.seen if seen.json["stream"]]
    assert [(seen.target, seen.json["prompt"]) for seen in streamed] == [
        ("/v1/completions", f"once {n}") for n in range(5)
    ]
    assert "the rate of the trace" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-requests", "3"], "--rate: give the requests per second"),
        (["--rate", "0"], "--rate 0: must be at least"),
        (["--rate", "2", "--k", "3"], "--k: requires --config"),
        (["--rate", "2", "--concurrency", "2"], "--concurrency: a closed loop has no --rate"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--rate", "2", "--input-tokens", "9-3"], "--input-tokens 9-3: expected N or N-M"),
        (["--rate", "2", "--baseline", "x"], "--baseline: no target 'x'"),
        (["--rate", "2", "--temperature", "hot"], "--temperature hot: expected numbers, such as 1,2"),
        (["--rate", "2", "--url", "ftp://x"], "--url ftp://x: expected http://host:port"),
        (["--rate", "2", "--config", "config/pool.yaml"], "measure endpoints or a pool, not both"),
        (["--rate", "2", "--warmup", "100"], "--warmup 100 leaves none to count"),
    ],
)
async def test_wrong_input_is_rejected_before_anything_is_sent(arguments: list[str], says: str) -> None:
    async with Upstream("a", "m") as server:
        status, _, error = invoked.run("bench", "--url", server.url, *arguments)
        await stays(lambda: server.connections == 0, 0.01)
    assert status == 2
    assert says in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "hed"], "--only: no backend 'hed'; did you mean 'head'?"),
        (["--model", "x"], "has no model 'x'"),
        (["--k", "x"], "--k x: expected numbers"),
        (["--only", "far", "--k", "3"], "--k: far already runs"),
    ],
)
def test_wrong_options_for_a_pool_are_rejected(tmp_path: Path, arguments: list[str], says: str) -> None:
    far = "{method: eagle, url: 'http://10.0.0.1:1', speculative_config: {num_speculative_tokens: 2}}"
    (tmp_path / "pool.yaml").write_text(f"{POOL}      far: {far}\n")
    status, _, error = invoked.run("bench", "--config", tmp_path / "pool.yaml", "--rate", "1", *arguments)
    assert status == 2
    assert says in error


@pytest.mark.slow
async def test_targets_that_fail_are_reported_and_the_others_measured() -> None:
    async def refuse(wire: Wire) -> None:
        await wire.json({"error": {"message": "the model is asleep"}}, 400)

    async with Upstream("a", "m") as gone:
        address = gone.url
    async with Upstream("b", "m", refuse) as sleeping, Upstream("c", "m", words(4)) as well:
        urls = [f"gone={address}", f"sleeping={sleeping.url}", f"well={well.url}"]
        options = [word for url in urls for word in ("--url", url)]
        status, out, _ = await run_bench(*options, "--rate", "50", "--num-requests", "2")
    assert status == 1
    assert re.search(r"gone: not measured: .*cannot be reached", out)
    assert re.search(r"sleeping: not measured: .*answered 400: .*the model is asleep", out)
    assert re.search(r"^well\b.*\b2\b", out, re.MULTILINE)


@pytest.mark.slow
def test_ctrl_c_while_a_pool_starts_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "bench", "--config", str(tmp_path / "pool.yaml"), "--rate", "5"],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        until(lambda: "starting plain" in (tmp_path / "log").read_text())
        until(lambda: len(family(process.pid)) > 1)
        everyone = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(30.0) == 130
    until(lambda: not alive(everyone - {process.pid}))
