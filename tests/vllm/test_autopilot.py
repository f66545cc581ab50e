"""`gateway autopilot --apply` with two real vLLM replicas: a baseline begins to draft while streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.support.paths import ROOT
from tests.vllm.conftest import ADMIN_KEY, Served, serve

pytestmark = pytest.mark.vllm

POOL = ROOT / "tests/vllm/pool.rescue.yaml"
REQUESTS = 510
TOKENS = 96
AT_ONCE = 16
STREAMS = 3
RUN_S = 900.0  # on a busy machine; two minutes on a quiet one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("autopilot")


@pytest.fixture(scope="module")
def served(installed: Path, folder: Path) -> Iterator[Served]:
    """Serve a baseline and a suffix replica, with a recorder that hashes the model's tokens."""
    text = POOL.read_text()
    lookup = text.index("      lookup:")
    config = folder / "pool.yaml"
    config.write_text(
        text[:lookup] + "      tree: # to begin with\n        method: suffix\n        serve: *engine\n"
        f"recorder: {{path: {folder / 'records'}, text: hashes, tokenizer: {ROOT / '.cache/tiny-models/target'}}}\n"
    )
    with serve(folder, str(config)) as served:
        served.warm_up()
        yield served


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


async def code(client: AsyncOpenAI, number: int, headers: dict[str, str] | None = None) -> tuple[str | None, int]:
    """Stream code that repeats itself; return why it ended, and its tokens."""
    line = f"    heap[{number % 7}] = heap[{number % 5}]\n"
    stream = await client.completions.create(
        model="tiny", prompt=f"def heapify_{number % 40}(heap):\n" + 12 * line, max_tokens=TOKENS, temperature=0,
        stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        extra_headers={"x-gateway-workload": "code", **(headers or {})},
    )  # fmt: skip
    reason, tokens = None, 0
    async for chunk in stream:
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        reason = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), reason)
    return reason, tokens


@pytest.mark.slow
async def test_a_baseline_becomes_a_drafting_replica_and_no_stream_is_lost(
    served: Served, client: AsyncOpenAI, folder: Path
) -> None:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[str | None, int]:
        async with limit:
            return await code(client, number)

    assert {*await asyncio.gather(*[one(number) for number in range(REQUESTS)])} == {("length", TOKENS)}
    before = {name: found["pid"] for name, found in served.backends().items()}
    (folder / "key").write_text(ADMIN_KEY)
    arguments = ["--config", folder / "pool.yaml", "--records", folder / "records", "--calibration", "tiny-cpu"]
    arguments += ["--window", "15min", "--restart-time", "10s", "--budget", "12", "--jobs", "1"]
    arguments += ["--apply", "--gateway", served.url, "--admin-key-file", folder / "key", "--json", folder / "out.json"]
    ended = asyncio.Event()
    answers: list[tuple[str | None, int]] = []

    async def keep_on(number: int) -> None:
        while not ended.is_set():
            answers.append(await code(client, number))

    streaming = [asyncio.create_task(keep_on(number)) for number in range(STREAMS)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "autopilot", *map(str, arguments), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "GATEWAY_ADMIN_KEY": ADMIN_KEY},
    )  # fmt: skip
    try:
        async with asyncio.timeout(RUN_S):
            printed = (await process.communicate())[0].decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        ended.set()
    await asyncio.gather(*streaming)
    print(printed)
    assert process.returncode == 0, printed + served.log_path.read_text()
    assert {*answers} == {("length", TOKENS)}
    now = served.backends()
    changes = json.loads((folder / "out.json").read_text())["changes"]
    assert changes["plain"]["after"]["method"] == now["plain"]["method"] != "baseline"
    assert {name for name, found in now.items() if found["pid"] != before[name]} == set(changes)
    assert all(found["state"] in ("up", "recovering") and found["restarts"] == 0 for found in now.values())
    await asyncio.to_thread(served.wait_up)  # slow start is over
    assert "# to begin with" in (folder / "pool.yaml").read_text()
    drafted = served.metric("gateway_drafted_tokens_total", backend="plain")
    assert await code(client, 0, {"x-gateway-backend": "plain"}) == ("length", TOKENS)
    assert served.metric("gateway_drafted_tokens_total", backend="plain") > drafted
    print(f"{len(answers)} streams went on; plain runs {now['plain']['method']}")
