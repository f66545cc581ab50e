"""What `gateway init` says of first wrong things, and of pools in which there is nothing to choose between."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from gateway.cli import engines
from gateway.config.load import load_pool
from tests.gateway.cli.test_engines import DRAFTS, IDLE, MODEL, engine, run
from tests.gateway.conftest import start_gateway
from tests.support.certificates import make_pair
from tests.support.upstream import Upstream
from tests.support.waiting import eventually

NONE = "gateway init: none of these can be used"


def drafts(count: int, later_steps: int) -> bytes:
    counts = f"vllm:spec_decode_num_drafts_total {count}\nvllm:inter_token_latency_seconds_count {later_steps}\n"
    return IDLE + counts.encode() + DRAFTS.partition(b"count 1000\n")[2]


async def test_two_names_are_two_pools_and_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    async with engine(model="a") as a, engine(model="b") as b:
        status, _, err = await run("init", a.url, b.url, "--config", str(path))
    assert status == 0
    names = [each.url.removeprefix("http://") for each in (a, b)]
    assert err == [
        f"These engines serve 2 models, each a pool of its own: a: {names[0]}; b: {names[1]}. A request for one never "
        "goes to another. If they are one model, start all with the same --served-model-name, and run this again."
    ]
    assert list(load_pool(path).models) == ["a", "b"]
    assert "# These engines serve 2 models" in path.read_text()


async def test_one_engine_leaves_nothing_to_choose(tmp_path: Path) -> None:
    async with engine(IDLE) as only:
        status, _, err = await run("init", only.url, "--config", str(tmp_path / "pool.yaml"))
    assert status == 0
    assert err[0].startswith(f"There is nothing to choose between: {MODEL}: {only.url.removeprefix('http://')} is one")
    command, config = err[1].split(" --speculative-config ")
    assert command == f"  vllm serve {MODEL} --served-model-name {MODEL} --port 8001"
    assert json.loads(config.strip("'"))["method"] == "ngram"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((13, 15), "# it drafts, but says how only"),
        ((1000, 1000), "in 100% of its steps, as a draft model, EAGLE and MTP do,"),
        ((300, 1000), "in 30% of its steps, as ngram and suffix do,"),
    ],
)
async def test_the_hint_at_a_method_follows_from_enough_steps(
    tmp_path: Path, counts: tuple[int, int], said: str
) -> None:
    path = tmp_path / "pool.yaml"
    async with engine(drafts(*counts)) as only:
        assert (await run("init", only.url, "--config", str(path)))[0] == 0
    assert said in path.read_text()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("", "/v1/models answered 401: set the backend's api_key"),
        ("wrong", "/v1/models answered 401: its api_key is not accepted"),
    ],
)
async def test_the_key_is_named_where_it_is_asked_for(tmp_path: Path, key: str, hint: str) -> None:
    refuses = b"HTTP/1.1 401 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    async with Upstream("locked", MODEL, models=refuses, close_after_answer=True) as locked:
        status, out, err = await run("init", locked.url, "--config", str(tmp_path / "a.yaml"), VLLM_API_KEY=key)
    assert (status, out) == (2, [f"{locked.url.removeprefix('http://')}: {hint}"])
    needs = "engines with a key need --api-key or VLLM_API_KEY"
    wrong = "the key is not accepted: give that of the engines with --api-key or VLLM_API_KEY"
    assert err == [f"{NONE}; {wrong if key else needs}"]


async def test_loading_engines_are_waited_for_with_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_POLL_S", 0.05)
    path, loading = tmp_path / "pool.yaml", engine()
    async with engine() as other:
        await loading.listen(0)
        loading.health_status = 503
        line = ("init", loading.url, other.url, "--config", str(path))
        status, out, err = await run(*line[:2], "--config", str(tmp_path / "b.yaml"))
        assert (status, err) == (2, [f"{NONE}; is it still loading? --wait waits"])
        assert "/health answered 503" in out[-1]
        status, _, err = await run(*line[:2], "--config", str(tmp_path / "b.yaml"), "--wait", "--wait-s", "0")
        assert (status, err) == (
            2,
            [f"Waiting for {loading.url}: /health answered 503 (at most 0 s in all)", f"{NONE}; not there after 0 s"],
        )
        before = loading.connections
        waiting = asyncio.create_task(run(*line, "--wait"))
        await eventually(lambda: loading.connections > before + 1)  # it has asked again
        loading.health_status = 200
        status, _, err = await waiting
        await loading.die()
    assert (status, err) == (0, [f"Waiting for {loading.url}: /health answered 503 (at most 600 s in all)"])
    assert len(load_pool(path).models[MODEL].backends) == 2


@pytest.mark.slow
async def test_the_other_scheme_is_told(tmp_path: Path) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    pair, context = make_pair(tmp_path / "tls"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    async with engine() as plain, await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context) as encrypted:
        place, port = plain.url.removeprefix("http://"), encrypted.sockets[0].getsockname()[1]
        line = ("init", f"https://{place}", f"http://127.0.0.1:{port}", "--config", str(tmp_path / "a.yaml"))
        status, out, err = await run(*line)
    assert (status, err) == (2, [NONE])
    assert out == [
        f"{place}: speaks http: write {plain.url}",
        f"127.0.0.1:{port}: speaks https: write https://127.0.0.1:{port}",
    ]


async def test_a_gateway_is_no_engine(tmp_path: Path) -> None:
    async with start_gateway() as running:
        status, out, err = await run("init", running.url + "/v1", "--config", str(tmp_path / "a.yaml"))
    name = running.url.removeprefix("http://")
    assert (status, err) == (2, [NONE])
    assert out == [f"{name}: is a gateway, not an engine: name the engines behind it"]


async def test_an_engine_named_by_two_names_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    async with engine() as one, engine() as two:
        other = one.url.replace("127.0.0.1", "localhost")
        status, _, err = await run("init", one.url, other, two.url, "--config", str(path))
    assert (status, err) == (0, [f"{other} and {one.url} are one engine, which is taken once"])
    assert [each.url for each in load_pool(path).models[MODEL].backends.values()] == [one.url, two.url]


async def test_the_clients_base_url_is_taken_for_the_gateways_address() -> None:
    async with start_gateway() as running:
        for url in (f"{running.url}/v1", f"{running.url.removeprefix('http://')}/v1/"):
            result = await running.command("status", url=url)
            assert result.exit_code == 0, result.stderr
            assert f" at {running.url}, up" in result.stdout
