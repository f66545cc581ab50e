"""What `gateway init` and `gateway check --probe` say of engines that run."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from itertools import cycle
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.engine import SEVERAL
from gateway.cli import engines
from gateway.cli.app import app
from gateway.config.load import load_pool
from tests.gateway.conftest import start_gateway
from tests.support.certificates import make_pair
from tests.support.upstream import END, Upstream, Wire, answer
from tests.support.waiting import eventually

IDLE = b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"
CACHE = b'vllm:cache_config_info{enable_prefix_caching="%b"} 1\n'
DRAFTS = b"vllm:spec_decode_num_drafts_total 300\nvllm:inter_token_latency_seconds_count 1000\n" + b"".join(
    b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%d"} 9\n' % position for position in range(5)
)
NGRAM = {"method": "ngram", "model": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "revision": None}
MODEL = "meta/llama"


def engine(metrics: bytes = IDLE, model: str = MODEL, config: object = None) -> Upstream:
    """Return an engine whose streams end with usage; with acceptance if it tells how it speculates."""

    async def behave(wire: Wire) -> None:
        match wire.seen.target:
            case "/server_info?config_format=json":
                known = {"vllm_config": {"speculative_config": config}}
                await wire.json(known if config else {"detail": "Not Found"}, 200 if config else 404)
            case "/v1/completions":
                assert (wire.seen.json["model"], wire.seen.json["max_tokens"]) == (model, 4)
                counts = {"speculative_decoding": {"num_accepted_draft_tokens": 0}} if config else {}
                documents = answer("x"), {**answer("x"), "metrics": counts}  # as with --enable-force-include-usage
                await wire.stream(*(b"data: %b\n\n" % json.dumps(each).encode() for each in documents), END)
            case _:
                await wire.json({"detail": "Not Found"}, 404)

    return Upstream("engine", model, behave, metrics=metrics)


async def run(*words: str, **environ: str) -> tuple[int, list[str], list[str]]:
    result = await asyncio.to_thread(CliRunner().invoke, app, words, env={"VLLM_API_KEY": "", **environ})
    return result.exit_code, result.stdout.splitlines(), result.stderr.splitlines()


async def test_init_writes_what_the_engines_say(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    async with (
        engine(IDLE + CACHE % b"True") as plain,
        engine(IDLE + CACHE % b"False" + DRAFTS, config=NGRAM) as told,
        engine(IDLE + DRAFTS) as untold,
        engine(model="other") as other,
    ):
        engines, dead = (plain, told, untold, other), "http://127.0.0.1:9"
        other.max_model_len = 0
        urls = (plain.url.removeprefix("http://"), told.url + "/v1", untold.url, other.url, other.url, dead)
        status, out, err = await run("init", *urls, "--config", str(path), VLLM_API_KEY="secret")
        ports = [each.url.rpartition("/")[2] for each in engines]
        assert [each.seen[1].header("authorization") for each in engines] == ["Bearer secret"] * 4
    assert status == 0, err
    assert [line.split() for line in out[1:6]] == [
        [ports[0], "0.32.0", "none", "2,048", "yes", "yes", "-"],
        [ports[1], "0.32.0", "ngram,", "k", "5", "2,048", "no", "yes", "yes"],
        [ports[2], "0.32.0", "unnamed,", "k", "5", "2,048", "?", "yes", "no"],
        [ports[3], "0.32.0", "none", "?", "?", "yes", "-"],
        ["127.0.0.1:9:", "refuses", "connections", "(All", "connection", "attempts", "failed)"],
    ]
    assert f"Wrote {path}: 3 x {MODEL}, 1 x other." in out[6]
    assert err[0].startswith(f"Left out, as comments: {dead}")
    text = path.read_text()
    assert "secret" not in text
    assert "drafts in 30% of its steps" in " ".join(line.strip(" #") for line in text.splitlines())
    assert "#   127.0.0.1:9: {url: http://127.0.0.1:9}" in text
    pool = load_pool(path, {"VLLM_API_KEY": "secret"})
    replicas = pool.models[MODEL].backends
    assert [(name, each.method.value, each.url) for name, each in replicas.items()] == [
        (ports[0], "baseline", plain.url),
        (ports[1], "ngram", told.url),
        (ports[2], "custom_class", untold.url),
    ]
    config = replicas[ports[1]].speculative_config
    assert config.model_dump(exclude_unset=True) == {"num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert [key.name for key in pool.keys] == ["engines"]


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://h/x", "http://h/x: must have no path"), ("http://127.0.0.1:9", "none of these can be used; is it stil")],
)
async def test_init_writes_nothing_of_no_engine(tmp_path: Path, url: str, said: str) -> None:
    status, _, err = await run("init", url, "--config", str(tmp_path / "a/pool.yaml"))
    assert (status, err[-1][: len(said) + 14]) == (2, f"gateway init: {said}")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
async def test_a_probe_says_each_difference_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    async with engine(IDLE + DRAFTS, config=NGRAM) as told, engine(IDLE, "x") as x, engine(IDLE, "x") as too:
        path.write_text(
            f"""\
models:
  {MODEL}:
    aliases: [llama]
    backends:
      plain: {told.url}
      gone:
        url: http://127.0.0.1:9
  y:
    backends: [{x.url}, {too.url}]
"""
        )
        status, out, err = await run("check", "--probe", "--config", str(path))
        _, said, warned = await run("check", "--config", str(path))
        asked = told.connections
        assert (await run("check", "--no-engines", "--config", str(path)))[::2] == (0, [])
        assert told.connections == asked
        _, [document], _ = await run("check", "--probe", "--json", "--config", str(path))
        path.write_text(
            f"""\
models:
  {MODEL}:
    backends:
      lookup:
        url: {told.url}
        speculative_config: {{method: ngram, num_speculative_tokens: 5, prompt_lookup_max: 3}}
"""
        )
        _, _, later = await run("check", "--probe", "--config", str(path))
        path.write_text(path.read_text().replace("max: 3", "max: 4"))
        assert (await run("check", "--probe", "--config", str(path)))[::2] == (0, [])
    assert warned == [line for line in err if ".gone." not in line]
    assert "Compared with the metrics of 1 of 4 engines." in said
    assert status == 1
    assert [line.split()[:2] for line in out if line.startswith(("plain", "gone"))] == [
        ["plain", "0.32.0"],
        ["gone:", "refuses"],
    ]
    at = f"models.{MODEL}.backends"
    assert err == [
        f"warning: {path}:3:15: models.{MODEL}.aliases[0]: not served by plain; "
        f"start it with --served-model-name {MODEL} llama",
        f"warning: {path}:5:7: {at}.plain.method: the pool file says baseline, but its engine speculates, with k 5",
        f"warning: {path}:7:14: {at}.gone.url: refuses connections (All connection attempts failed)",
        f"warning: {path}:8:3: models.y: none of 2 engines serves y, all serve x: call the model x in the pool file, "
        "or start them with --served-model-name y",
    ]
    warnings = [each["where"] for each in json.loads(document)["warnings"]]
    assert [f": {each}: " in line for each, line in zip(warnings, err, strict=True)] == [True] * 4
    assert later == [
        f"warning: {path}:6:91: {at}.lookup.speculative_config.prompt_lookup_max: the pool file says 3, "
        "but its engine 4"
    ]


@pytest.mark.slow
async def test_an_engine_without_statistics_is_no_baseline(tmp_path: Path) -> None:
    path, config = tmp_path / "pool.yaml", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    async with engine(b"process_start_time_seconds 5\n", config=config) as silent:
        await run("init", silent.url, "--config", str(path))
        (backend,) = load_pool(path).models[MODEL].backends.values()
        assert backend.method == "ngram"
        assert (await run("check", "--probe", "--config", str(path)))[::2] == (0, [])


HOSTILE = "x\x1b[2J\x9b31m\u202e\x85\nkeys: []\x00"
"""Clears the screen, colours, reverses what follows, and ends a line of a terminal or a comment of YAML."""


@pytest.mark.slow
async def test_what_an_engine_says_steers_neither_terminal_nor_file(tmp_path: Path) -> None:
    path, config = tmp_path / "pool.yaml", {"method": "eagle3", "model": HOSTILE, "num_speculative_tokens": 5}
    async with engine(IDLE + DRAFTS, config=config) as hostile:
        hostile.version = HOSTILE
        status, *made = await run("init", hostile.url, "--config", str(path))
        assert status == 0, made
        written = path.read_text()
        pool = load_pool(path, {})
        assert (list(pool.models), pool.keys) == ([MODEL], [])
        hostile.model = HOSTILE
        _, *checked = await run("check", "--probe", "--config", str(path))
    for lines in (made[0], checked[1], written.splitlines()):
        assert "".join(lines).isprintable(), ascii(lines)
        assert r"x\x1b[2J\x9b31m\u202e\x85\nkeys: []\x00" in "".join(lines)


async def test_several_engines_behind_one_address_are_told(tmp_path: Path) -> None:
    starts = cycle((1.0, 2.0))

    async def in_turn(wire: Wire) -> None:
        page = IDLE + b"process_start_time_seconds %f\n" % next(starts)
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)

    async with engine() as one, engine() as several:
        several.metrics_behaviour = in_turn
        path = tmp_path / "pool.yaml"
        status, _, _ = await run("init", one.url, several.url, "--config", str(path))
        assert (status, path.read_text().count(f"# {SEVERAL}")) == (0, 1)
        status, _, err = await run("check", "--probe", "--config", str(path))
        assert (status, [line.endswith(SEVERAL) for line in err]) == (1, [True])


# First wrong things, and pools in which there is nothing to choose between


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
        urls = f"https://{place}", f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}"
        line = ("init", *urls, "--config", str(tmp_path / "a.yaml"))
        status, out, err = await run(*line)
    assert (status, err) == (2, [NONE])
    untrusted = out.pop()
    assert untrusted.startswith(f"127.0.0.1:{port}: cannot be connected to by TLS (")
    assert untrusted.endswith("): SSL_CERT_FILE names the file of an authority to trust")
    assert out == [
        f"{place}: speaks http: write {plain.url}",
        f"127.0.0.1:{port}: speaks https: write https://127.0.0.1:{port}",
    ]


async def test_an_engine_that_stands_still_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_SLOW_S", 0.05)
    ended = asyncio.Event()

    async def stand_still(wire: Wire) -> None:
        await (ended.wait() if wire.seen.target == "/v1/completions" else wire.json({"detail": "Not Found"}, 404))

    async with Upstream("engine", MODEL, stand_still, metrics=IDLE) as stuck:
        status, _, err = await run("init", stuck.url, "--config", str(tmp_path / "pool.yaml"))
        ended.set()
    assert (status, err) == (2, ["gateway init: none of these can be used"])


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
