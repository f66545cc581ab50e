"""`gateway bench` on the command line, against scripted servers and simulated replicas."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from tests.support.command import ROOT, alive, family, until
from tests.support.report import ReportPage
from tests.support.upstream import Upstream, Wire, answer, delta
from tests.support.waiting import eventually, stays

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


async def run_bench(*arguments: str) -> tuple[int, str, str]:
    """Run the command; return its status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "bench", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 90.0)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def streaming(tokens: int, per_chunk: int = 1, *, usage: bool = True) -> Any:
    """Return a behaviour that streams `tokens` tokens in chunks."""

    async def stream(wire: Wire) -> None:
        if not wire.seen.json["stream"]:
            document = answer("x")
            document["usage"]["prompt_tokens"] = 9 + 2 * len(wire.seen.json["messages"][0]["content"].split())
            await wire.json(document)
            return
        await wire.begin_stream()
        for _ in range(tokens // per_chunk):
            await wire.chunk(delta("x"))
        if usage:
            counts = {"prompt_tokens": 40, "completion_tokens": tokens, "total_tokens": 40 + tokens}
            await wire.chunk(b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n")
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.end_stream()

    return stream


@pytest.mark.slow
async def test_an_endpoint_is_measured_and_reported(tmp_path: Path) -> None:
    async with Upstream("a", "the-model", streaming(12, 3)) as server:
        status, out, err = await run_bench(
            *("--url", f"{server.url}/v1", "--rate", "200", "--num-requests", "20", "--warmup", "3"),
            *("--input-tokens", "100", "--output-tokens", "12", "--temperature", "0,0.5"),
            *("--header", "X-Team: secret-team", "--api-key", "secret-key"),
            *("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")),
        )
    assert status == 0, err
    streamed = [seen for seen in server.seen if seen.json["stream"]]
    assert len(streamed) == 2 * (20 + 3)
    assert {seen.header("x-team") for seen in server.seen} == {"secret-team"}
    assert {seen.header("authorization") for seen in server.seen} == {"Bearer secret-key"}
    assert [sum(seen.json["temperature"] == t for seen in streamed) for t in (0, 0.5)] == [23, 23]
    texts = [seen.json["messages"][0]["content"] for seen in streamed]
    assert len(set(texts)) == len(texts)
    assert {len(text.split()) for text in texts} == {round((100 - 9) / 2)}  # by this server's token count
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["schema"] == "speculation-gateway.bench/1"
    cold, warm = report["runs"]
    assert (cold["temperature"], warm["temperature"]) == (0.0, 0.5)
    for run in report["runs"]:
        assert (run["model"], run["completed"], run["failed"]) == ("the-model", 20, 0)
        assert (run["output_tokens"], run["input_tokens"]) == (20 * 12, 20 * 40)
        assert run["output_tokens_per_s"] == pytest.approx(240 / run["duration_s"])
        assert (run["tokens_per_chunk"], run["tokens_counted_by"]) == (3.0, "usage")
        assert run["e2e"]["p50"] >= run["ttft"]["p50"] > 0
        assert run["load"] == {"kind": "rate", "value": 200.0}
        assert 0.02 < run["duration_s"] < 5
        assert run["generator"]["late_p99_ms"] is not None
    for secret in ("secret-team", "secret-key"):
        assert secret not in out + err + (tmp_path / "r.json").read_text() + (tmp_path / "r.html").read_text()
    assert "TPOT" in out


@pytest.mark.slow
async def test_the_replicas_of_a_pool_are_compared_with_its_baseline(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    status, out, err = await run_bench(
        *("--config", str(pool), "--concurrency", "4", "--num-requests", "12", "--temperature", "0", "--k", "1,3"),
        *("--input-tokens", "64", "--output-tokens", "48", "--ignore-eos"),
        *("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")),
    )
    assert status == 0, err
    runs = {run["target"]: run for run in json.loads((tmp_path / "r.json").read_text())["runs"]}
    assert list(runs) == ["plain", "head k=1", "head k=3"]  # the baseline first, once
    for name, run in runs.items():
        assert run["completed"] == 12
        assert run["output_tokens"] == 12 * 48
        assert run["simulated"]
        assert run["input_tokens"] == pytest.approx(12 * 64, rel=0.1)
        assert run["k"] == {"plain": 0, "head k=1": 1, "head k=3": 3}[name]
    assert runs["plain"]["acceptance"] is None
    assert runs["plain"]["speedup"] is None
    for k in (1, 3):
        run = runs[f"head k={k}"]
        assert run["acceptance"]["source"] == "answers"
        assert len(run["acceptance"]["by_position"]) == k
        assert run["acceptance"]["tokens_per_step"] == pytest.approx(run["tokens_per_chunk"], rel=0.15)
        gain = run["speedup"]["output_tokens_per_s"]
        assert run["speedup"]["baseline"] == "plain"
        assert gain["value"] == pytest.approx(run["output_tokens_per_s"] / runs["plain"]["output_tokens_per_s"])
        assert gain["low"] is None or gain["low"] <= gain["value"] <= gain["high"]
    assert "Simulated" in out
    page = ReportPage((tmp_path / "r.html").read_text())
    assert [row[0] for row in page.tables["Throughput; speedups with 95% intervals"][1:]] == list(runs)
    assert len(page.drawings) >= 7
    assert "Where speculation loses" in page.headings


@pytest.mark.slow
async def test_endpoints_are_compared_by_name() -> None:
    async with Upstream("a", "m", streaming(8)) as one, Upstream("b", "m", streaming(8)) as other:
        status, out, _ = await run_bench(
            *("--url", f"baseline={one.url}", "--url", f"mine={other.url}", "--concurrency", "2", "--num-requests", "6")
        )
    assert status == 0
    assert re.search(r"mine .*\d\.\d\d( \(\d\.\d\d-\d\.\d\d\))?", out)
    asked = [[seen.json["messages"] for seen in server.seen] for server in (one, other)]
    assert sorted(map(str, asked[0])) == sorted(map(str, asked[1]))  # the same prompts


async def test_answers_without_usage_are_counted_by_chunks_with_a_note() -> None:
    async with Upstream("a", "m", streaming(8, usage=False)) as server:
        status, out, _ = await run_bench("--url", server.url, "--concurrency", "2", "--num-requests", "4")
    assert status == 0
    assert "no usage" in out


async def test_failures_are_reported_by_kind() -> None:
    turn = 0

    async def every_third_fails(wire: Wire) -> None:
        nonlocal turn
        turn += 1
        if wire.seen.json["stream"] and turn % 3 == 0:
            await wire.json({"error": {"message": "too much of it"}}, 429)
        else:
            await streaming(4)(wire)

    async with Upstream("a", "m", every_third_fails) as server:
        status, out, _ = await run_bench("--url", server.url, "--concurrency", "1", "--num-requests", "12")
    assert status == 0
    assert re.search(r"4 failed, http 429: .*too much of it", out)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-requests", "3"], "no load given"),
        (["--rate", "2", "--concurrency", "2"], "a loop is open or closed"),
        (["--rate", "0"], "--rate: must be greater than 0"),
        (["--rate", "2", "--k", "3"], "--k: requires --config"),
        (["--rate", "2", "--trace", "nowhere.csv"], "nowhere.csv: no such file"),
        (["--rate", "2", "--dataset", "CHANGELOG.md"], "CHANGELOG.md:1: not JSON"),
        (["--rate", "2", "--input-tokens", "9-3"], "--input-tokens: the range is reversed"),
        (["--rate", "2", "--header", "foo"], "--header: expected NAME: VALUE"),
        (["--rate", "2", "--prompts", "randm"], "did you mean 'random'"),
        (["--rate", "2", "--baseline", "x"], "--baseline: no target 'x'"),
        (["--rate", "2", "--html", "/nowhere/x.html"], "its folder does not exist"),
        (["--rate", "2", "--endpoint", "responses"], "--endpoint: unknown 'responses'"),
        (["--rate", "2", "--temperature", "hot"], "--temperature: expected a number"),
        (["--rate", "2", "--url", "ftp://x"], "--url: expected http://host:port"),
        (["--rate", "2", "--config", "config/pool.yaml"], "--config: given beside --url"),
    ],
)
async def test_wrong_input_is_rejected_before_anything_is_sent(arguments: list[str], says: str) -> None:
    async with Upstream("a", "m") as server:
        result = CliRunner().invoke(app, ["bench", "--url", server.url, *arguments], env={"OPENAI_API_KEY": None})
        await stays(lambda: server.connections == 0, 0.01)
    assert result.exit_code == 2, result.output
    assert says in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "hed"], "--only: no backend 'hed'; did you mean 'head'?"),
        (["--model", "x"], "--model: no model 'x'"),
        (["--k", "x"], "--k: expected a whole number"),
    ],
)
def test_wrong_options_for_a_pool_are_rejected(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "pool.yaml").write_text(POOL)
    result = CliRunner().invoke(app, ["bench", "--config", str(tmp_path / "pool.yaml"), "--rate", "1", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr


async def test_k_cannot_be_set_for_running_replicas(tmp_path: Path) -> None:
    replica = "{method: eagle, url: 'http://10.0.0.1:1', speculative_config: {num_speculative_tokens: 2}}"
    pool = f"models: {{m: {{policy: {{name: round_robin}}, backends: {{far: {replica}}}}}}}\n"
    (tmp_path / "pool.yaml").write_text(pool)
    status, _, err = await run_bench("--config", str(tmp_path / "pool.yaml"), "--rate", "1", "--k", "3")
    assert status == 2
    assert "--k: far already runs" in err


@pytest.mark.slow
async def test_targets_that_fail_are_reported_and_the_others_measured() -> None:
    async def refuse(wire: Wire) -> None:
        await wire.json({"error": {"message": "the model is asleep"}}, 400)

    async with Upstream("a", "m") as gone:
        address = gone.url
    async with Upstream("b", "m", refuse) as sleeping, Upstream("c", "m", streaming(4)) as well:
        urls = [f"gone={address}", f"sleeping={sleeping.url}", f"well={well.url}"]
        options = [word for url in urls for word in ("--url", url)]
        status, out, _ = await run_bench(*options, "--concurrency", "1", "--num-requests", "2")
    assert status == 1
    assert re.search(r"gone: not measured: .*cannot be reached", out)
    assert re.search(r"sleeping: not measured: .*answered 400: .*the model is asleep", out)
    assert re.search(r"^well\b.*\b2\b", out, re.MULTILINE)


async def test_a_missing_model_is_reported() -> None:
    async with Upstream("a", "m") as server:
        status, out, _ = await run_bench("--url", server.url, "--concurrency", "1", "--model", "other")
    assert status == 1
    assert "has no model 'other'; it has m" in out


async def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    async with Upstream("a", "m", streaming(4)) as server:

        async def hang_after_ten(wire: Wire) -> None:
            if len(server.seen) <= 10:
                await streaming(4)(wire)
            else:
                await wire.until_closed()

        server.behaviour = hang_after_ten
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "bench", "--url", server.url, "--concurrency", "2"),
            *("--num-requests", "50", "--json", str(tmp_path / "r.json")),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await eventually(lambda: len(server.seen) >= 12)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 30.0)
    assert process.returncode == 130, err
    assert b"stopped" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"]
    (run,) = report["runs"]
    assert (run["completed"], run["failed"], run["interrupted"]) == (8, 0, True)  # two of the ten were the preflight


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
