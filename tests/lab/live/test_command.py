"""`gateway replay --live` on the command line, against scripted servers and a gateway with simulated replicas."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from backends.calibration.calibration import Kind
from backends.speculation import Method
from lab.calibrate.command import read_loops
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from tests.lab import invoked
from tests.lab.pool import pool_of
from tests.support.command import Command, gateway_command, until
from tests.support.paths import ROOT
from tests.support.stepping_engine import SteppingEngine
from tests.support.upstream import Wire, upstreams_in_thread
from tests.support.waiting import eventually_blocking

pytestmark = pytest.mark.slow

AZURE = ROOT / "tests" / "data" / "AzureLLMInferenceTrace_code.csv"
POOL = f"""\
{pool_of("{name: round_robin}", "plain", "head")}
keys:
  - {{name: team, key: team-key, may_override: true}}
"""

streamed = SteppingEngine(tokens=4, prompt_tokens=None)
"""An engine whose prompts have ten tokens more than words."""


def test_requests_are_sent_on_time_regardless_of_earlier_answers(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    chats = [
        TraceRecord(
            arrived_at=n / 100, model="gpt", endpoint="chat", prompt_tokens=30 + n, output_tokens=4, workload="code"
        )
        for n in range(11)
    ]
    embedding = TraceRecord(arrived_at=0.2, endpoint="embeddings", prompt="a", prompt_tokens=1)
    text = TraceRecord(arrived_at=0.2, prompt="once upon a time", prompt_tokens=4, output_tokens=4)
    write_trace(trace, [*chats, embedding, text])
    all_came, streams = asyncio.Event(), 0

    async def held_back(wire: Wire) -> None:
        nonlocal streams
        if wire.seen.json["stream"]:
            streams += 1
            if streams == 12:
                all_came.set()
            await all_came.wait()
        await streamed(wire)

    with upstreams_in_thread(["a"], "the-model", held_back) as [server]:
        given = (trace, "--live", f"{server.url}/v1", "--warmup", 2, "--api-key", "secret-key", "--slo", "e2e=60")
        printed, document = invoked.figures("replay", tmp_path, *given, "--report", page)
    sent = [seen for seen in server.seen if seen.json["stream"]]
    assert [seen.target for seen in sent] == ["/v1/chat/completions"] * 11 + ["/v1/completions"]
    assert {seen.json["model"] for seen in sent} == {"the-model"}
    assert {seen.header("authorization") for seen in server.seen} == {"Bearer secret-key"}
    assert {seen.header("x-gateway-workload") for seen in sent[:-1]} == {"code"}
    assert [len(seen.json["messages"][0]["content"].split()) for seen in sent[:-1]] == [20 + n for n in range(11)]
    assert (document["requests"], document["warmup"], document["interrupted"]) == (10, 2, False)
    [(name, one)] = document["policies"].items()
    assert name == server.url.removeprefix("http://")
    assert (one["requests"], one["errors"], one["slo_kept"], one["shares"]) == (10, 0, 1.0, {})
    assert 0 < one["ttft_s"]["p50"] <= one["e2e_s"]["p50"]
    assert "10 requests for the-model" in printed
    assert "1 more generate no text and are left out." in printed
    assert name in page.read_text()


def test_every_rate_is_sent_at_every_temperature_for_some_seconds(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    write_trace(trace, [TraceRecord(arrived_at=n, prompt_tokens=20 + n, output_tokens=4) for n in range(3)])
    sweep = ("--rate", 20, "--rate", 60, "--temperature", 0, "--temperature", 0.7, "--for", 0.25, "--report", page)
    with upstreams_in_thread(["one", "other"], "m", streamed) as servers:
        endpoints = [word for server in servers for word in ("--live", f"{server.name}={server.url}")]
        printed, document = invoked.figures("replay", tmp_path, trace, *endpoints, *sweep)
    for server in servers:
        sent = [seen.json["temperature"] for seen in server.seen if seen.json["stream"]]
        assert sent == [0.0] * (5 + 15) + [0.7] * (5 + 15), "the trace has three requests, which are repeated"
    assert {name: row["requests"] for name, row in document["policies"].items()} == {
        f"{name}, {rate} requests/s, temperature {at}": count
        for at in ("0", "0.7")
        for rate, count in ((20, 5), (60, 15))
        for name in ("one", "other")
    }
    assert len(re.findall(r"^[26]0 requests/s, temperature 0(\.7)?: ", printed, re.MULTILINE)) == 4  # who won
    assert "other, 60 requests/s, temperature 0.7" in page.read_text()


def test_closed_loops_keep_so_many_requests_under_way(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRecord(prompt_tokens=20, output_tokens=4)])
    with upstreams_in_thread(["a"], "m", streamed) as [server]:
        loops = ("--live", f"baseline={server.url}", "--concurrency", 1, "--concurrency", 3, "--limit", 9)
        _, document = invoked.figures("replay", tmp_path, trace, *loops)
    written = document["loops"]
    assert [(loop["method"], loop["concurrency"]) for loop in written] == [("baseline", 1), ("baseline", 3)]
    for loop in written:
        each = loop["each"]
        sent_s, ended_s = each["sent_s"], sorted(map(sum, zip(each["sent_s"], each["e2e_s"], strict=True)))
        under_way = [sum(at < end for at in sent_s) - sum(at < end for at in ended_s) for end in ended_s]
        assert max(under_way) <= loop["concurrency"]
        assert each["steps"] == [4] * 9
    [first, *_] = read_loops(tmp_path / "figures.json", Kind.CHAT)
    assert (first.method, first.concurrency, first.k) == (Method.BASELINE, 1, 0)


def test_ctrl_c_prints_the_finished_requests(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    arrivals = [0.0, 0.01, 0.02, 3600.0]
    write_trace(trace, [TraceRecord(arrived_at=at, prompt_tokens=20, output_tokens=4) for at in arrivals])
    streams = 0

    async def third_hangs(wire: Wire) -> None:
        nonlocal streams
        streams += bool(wire.seen.json["stream"])
        if streams == 3:
            await wire.until_closed()
            return
        await streamed(wire)

    with upstreams_in_thread(["a"], "m", third_hangs) as [server]:
        live = ("--live", f"first={server.url}", "--live", f"second={server.url}", "--json", out)
        command = [sys.executable, "-m", "gateway", "replay", *map(str, (trace, *live))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            eventually_blocking(lambda: streams == 3)
            process.send_signal(signal.SIGINT)
            printed, error = process.communicate(timeout=90.0)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert printed.startswith("Stopped early: nobody won.\n")
    assert "stopped: unfinished requests are not included" in printed
    document = orjson.loads(out.read_bytes())
    assert document["interrupted"]
    assert {name: (one["requests"], one["errors"]) for name, one in document["policies"].items()} == {"first": (2, 0)}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("gateway")
    pool = folder / "pool.yaml"
    pool.write_text(POOL)
    with gateway_command(pool, folder) as running:
        until(lambda: running.get("/readyz").status_code == 200, what="the replicas ready")
        yield running


def test_shares_come_from_the_gateway(gateway: Command, tmp_path: Path) -> None:
    given = (AZURE, "--live", gateway.url, "--limit", 12, "--rate", 12, "--api-key", "team-key")
    printed, document = invoked.figures("replay", tmp_path, *given)
    [one] = document["policies"].values()
    assert (one["requests"], one["errors"]) == (12, 0)
    assert one["shares"] == {"head": 0.5, "plain": 0.5}  # round robin; the preflight sends an even number of requests
    assert "head 50%  plain 50%" in printed
    assert f"`gateway compare report --url {gateway.url}`, or with the address of its `admin.listen`" in printed


def test_a_missing_key_is_reported_before_anything_is_sent(gateway: Command) -> None:
    error = invoked.refused("replay", AZURE, "--live", gateway.url)
    assert "/v1/models answered 401; give the key with --api-key" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--live", "127.0.0.1:8000"], "--live 127.0.0.1:8000: expected http://host:port"),
        (["--live", "http://127.0.0.1:9"], "http://127.0.0.1:9: cannot be reached: ConnectError"),
        (["--live", "http://127.0.0.1:9", "--config", "config/pool.yaml"], "omit it with --live"),
        (["--live", "http://127.0.0.1:9", "--policy", "learned"], "omit it with --live"),
        (["--live", "http://127.0.0.1:9", "--live", "http://127.0.0.1:9"], "is given twice; name them"),
        (["--live", "http://127.0.0.1:9", "--warmup", 40], "--warmup 40 leaves none to count"),
        (["--live", "http://127.0.0.1:9", "--for", 2], "--for: give the requests per second"),
        (["--live", "http://127.0.0.1:9", "--rate", 0], "0: give a number above 0"),
        (["--live", "http://127.0.0.1:9", "--rate", 2, "--concurrency", 2], "a closed loop has no --rate"),
        (["--ignore-eos", "--config", "config/pool.yaml"], "requires --live"),
        (["--temperature", 0, "--config", "config/pool.yaml"], "requires --live"),
        (["--rate", 2, "--rate", 8, "--config", "config/pool.yaml"], "--rate: several need --live"),
        ([], "give a pool to simulate, or --live URL"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(options: list[object], message: str) -> None:
    assert message in invoked.refused("replay", AZURE, *options)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    given = (empty, "--live", "http://127.0.0.1:9")
    assert invoked.refused("replay", *given) == "gateway replay: the trace has no requests\n"
    write_trace(empty, [TraceRecord(endpoint="embeddings", arrived_at=0.0, prompt="a")])
    assert "no requests that generate text" in invoked.refused("replay", *given)


def test_the_status_is_1_without_any_successful_request(tmp_path: Path) -> None:
    async def refuses_streams(wire: Wire) -> None:
        if wire.seen.json["stream"]:
            await wire.json({"error": {"message": "no more"}}, 503)
        else:
            await streamed(wire)

    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRecord(arrived_at=0.0, prompt_tokens=9, output_tokens=2)])
    with upstreams_in_thread(["a"], "m", refuses_streams) as [server]:
        status, printed, _ = invoked.run("replay", trace, "--live", server.url)
    assert status == 1
    assert "1 failed, http 503: " in printed
