"""Who may ask for what: paths, keys and their scopes, names of models, CORS, and where the gateway connects to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.http.paths import DEFAULT_PATHS
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running, Start, bearer
from tests.gateway.relay.test_frontends import Raw
from tests.support.upstream import END, Wire, answer, delta

KEYS = [
    {"name": "team", "key": "sk-team"},
    {"name": "viewer", "key": "sk-viewer", "admin": "read"},
    {"name": "operator", "key": "sk-operator", "admin": "write"},
]
PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}
BODY = json.dumps({"model": MODEL, "messages": []}).encode()


async def raw(running: Running, target: str, method: str = "POST", body: bytes = BODY, extra: str = "") -> bytes:
    """Send a request with a target as it stands on a connection of its own, and return the answer."""
    head = f"{method} {target} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{extra}content-length: {len(body)}\r\n\r\n"
    async with Raw.to(running) as connection, asyncio.timeout(10):
        connection.writer.write(head.encode() + body)
        return await connection.reader.read()


def status_of(answered: bytes) -> int:
    return int(answered.split(b" ", 2)[1])


# Paths


async def test_only_the_documented_paths_are_relayed(gateway_of: Start) -> None:
    closed = ["/sleep", "/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter", "/server_info"]
    closed += ("/invocations", "/inference/v1/generate", "/docs", "/openapi.json", "/v1/completions/x", "/")
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:
        for path in closed:
            assert (await running.client.post(path, content=BODY)).status_code == 401
            response = await running.client.post(path, content=BODY, headers=bearer("sk-team"))
            assert response.status_code == 404
            assert "`paths`" in response.json()["error"]["message"]
        assert running.upstreams["a"].seen == []
        opened = [path.replace("*", "resp_1") for path in DEFAULT_PATHS]
        for path in opened:
            response = await running.client.post(path, content=BODY, headers=bearer("sk-team"))
            assert response.status_code == 200
        assert [request.target for request in running.upstreams["a"].seen] == opened


async def test_the_pool_file_opens_other_paths(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, paths=["/sleep", "/v1/x*"]) as running:
        statuses = {}
        for path in ("/sleep", "/sleep/x", "/v1/x", "/v1/xyz/a", "/v1/chat/completions", "/health"):
            statuses[path] = (await running.client.get(path)).status_code
        assert [*statuses.values()] == [200, 404, 200, 200, 404, 200], statuses


UNCLEAR = ["/v1//x", "//v1/x", "/v1/../admin/pool", "/v1/./x", "/v1/%2e%2e/x", "/v1%2fx", "/v1/..%2fx", "/v1/a%00b"]
UNCLEAR += ["/v1/%252e%252e/x", "/v1/a%20b", "/v1/a%0d%0ab", "/v1/a\\..\\b", "/v1/a;b", "/v1/a%ffb", "/health/../x"]


async def test_a_path_that_can_be_read_in_several_ways_is_not_relayed(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, paths=["/*"]) as running:
        for target in UNCLEAR:
            assert status_of(await raw(running, target)) in {400, 404}, target
        assert running.upstreams["a"].seen == []


async def test_what_is_judged_is_what_the_backend_gets(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        for target in ("/v1/chat/%63ompletions?a=%2F..", "/v1/chat/completions/?a=%2F.."):
            assert status_of(await raw(running, target)) == 200
        assert {request.target for request in running.upstreams["a"].seen} == {"/v1/chat/completions?a=%2F.."}
        assert await running.counted("gateway_output_tokens_total") == 6, "both are judged"


# Keys


SCOPES = [
    ("GET", "/admin/pool", "read"),
    ("GET", "/admin/config", "read"),
    ("POST", "/admin/explain", "read"),
    ("POST", "/admin/drain", "write"),
]


async def test_scopes_of_keys(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:
        for method, path, scope in SCOPES:
            body = {"model": MODEL, "backend": "a", "messages": []} if method == "POST" else None
            statuses = {}
            for key in ("", "sk-wrong", "sk-team", "sk-viewer", "sk-operator", ADMIN_KEY):
                headers = bearer(key) if key else {}
                statuses[key] = (await running.client.request(method, path, json=body, headers=headers)).status_code
            viewer = 200 if scope == "read" else 403
            assert list(statuses.values()) == [401, 401, 403, viewer, 200, 200], path
        assert (await running.chat(headers=bearer(ADMIN_KEY))).status_code == 401, "it is for /admin only"
        config = (await running.client.get("/admin/config", headers=bearer("sk-viewer"))).json()
        assert [set(key) & {"key", "sha256"} for key in [*config["keys"], config["admin"]]] == [set()] * 4


async def test_the_environment_of_engines_is_not_shown(gateway_of: Start) -> None:
    served = {"method": "baseline", "serve": {"model": "org/target", "env": {"HF_TOKEN": "hf-secret"}}}
    models = {MODEL: {"policy": {"name": "random"}, "default_temperature": 1.0, "backends": {"a": served}}}
    async with gateway_of({"a": "baseline"}, keys=KEYS, models=models) as running:
        shown = await running.client.get("/admin/config", headers=bearer("sk-viewer"))
        assert "org/target" in shown.text
        assert "hf-secret" not in shown.text


async def test_keys_are_kept_as_digests_only(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS, admin={"key": "sk-admin"}) as running:
        settings = running.gateway.settings
        assert [key.key for key in settings.keys] == [None] * 3
        assert settings.admin.key is None
        keyring = running.gateway.relay.access.keyring
        held = (vars(settings.keys[0]), vars(settings.admin), keyring._clients, keyring._admin)
        assert "sk-" not in repr(held)


OTHER = "secret-model"
TWO: dict[str, Any] = {
    name: {
        "policy": {"name": "random"},
        "default_temperature": 1.0,
        "backends": {backend: {"method": "baseline", "url": url}},
    }
    for name, backend, url in ((MODEL, "a", "http://127.0.0.1:1"), (OTHER, "z", "http://127.0.0.1:2"))
}
TWO[OTHER]["aliases"] = ["hidden-alias"]


@pytest.mark.slow
async def test_names_of_models_are_told_only_to_those_who_may_use_them(gateway_of: Start) -> None:
    keys = [{"name": "some", "key": "sk-some", "models": [MODEL]}, {"name": "all", "key": "sk-all"}]
    async with gateway_of({"a": "baseline"}, keys=keys, models=TWO) as running:
        client, some = running.client, bearer("sk-some")
        answers = [
            await client.post("/v1/chat/completions", json={"messages": []}, headers=some),
            await client.post("/v1/chat/completions", json={"model": "nope"}, headers=some),
            await client.post("/v1/chat/completions", json={"model": OTHER}, headers=some),
            await client.post("/v1/chat/completions", json={}, headers=some | {"x-gateway-model": OTHER}),
            await client.get("/v1/models", headers=some),
            await client.get("/readyz", headers=some),
        ]
        for response in answers:
            text = response.text.replace(f"`{OTHER}`", "")  # what the client sent
            assert OTHER not in text
            assert "hidden" not in text
        unknown, known = answers[1].json()["error"], answers[2].json()["error"]
        assert known["message"] == unknown["message"].replace("nope", OTHER), "existence is not told"
        keyless = [
            await client.options("/v1/chat/completions", headers={"x-gateway-model": OTHER}),
            await client.post("/v1/chat/completions", json={"model": OTHER}),
            await client.get("/v1/models"),
            await client.get("/readyz"),
        ]
        await running.upstreams["a"].die()
        await running.until(lambda: running.backend("a").health.state == "down")
        keyless.append(await client.options("/v1/chat/completions"))
        assert [response.status_code for response in keyless] == [200, 401, 401, 503, 503]
        for response in keyless:
            assert OTHER not in response.text
            assert response.status_code == 200 or f'"{MODEL}"' not in response.text
        everyone = await client.post("/v1/chat/completions", json={"messages": []}, headers=bearer("sk-all"))
        assert f"there are: hidden-alias, {MODEL}, {OTHER}" in everyone.text


# Without a key


@pytest.mark.slow
async def test_options_without_a_key_are_relayed_without_a_body_only(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:
        assert status_of(await raw(running, "/v1/chat/completions", "OPTIONS", b"")) == 200
        assert status_of(await raw(running, "/v1/chat/completions", "OPTIONS", b"x")) == 401
        chunked = "transfer-encoding: chunked\r\n"
        assert status_of(await raw(running, "/v1/chat/completions", "OPTIONS", b"", chunked)) in {400, 401}
        wrong = "authorization: Bearer sk-wrong\r\n"
        assert status_of(await raw(running, "/v1/chat/completions", "OPTIONS", b"", wrong)) == 401
        assert [request.body for request in running.upstreams["a"].seen] == [b""]


async def test_requests_without_a_key_take_no_places_from_those_with_one(gateway_of: Start) -> None:
    release = asyncio.Event()

    async def held(wire: Wire) -> None:
        if wire.seen.method == "OPTIONS":
            await release.wait()
        await wire.json(answer("a"))

    async with gateway_of({"a": "baseline"}, keys=KEYS, server={"max_in_flight": 1, "drain_s": 1}) as running:
        running.upstreams["a"].behaviour = held
        waiting = [asyncio.create_task(running.client.options("/version")) for _ in range(16)]
        await running.until(lambda: len(running.upstreams["a"].seen) == 16)
        assert (await running.client.options("/version")).status_code == 429
        assert (await running.chat(headers=bearer("sk-team"))).status_code == 200
        release.set()
        assert {(await each).status_code for each in waiting} == {200}
        assert (await running.client.options("/version")).status_code == 200


async def test_own_paths_take_no_body_before_a_key_was_checked(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS) as running:
        for method, path, status in (
            ("POST", "/health", 400),
            ("POST", "/v1/models", 400),
            ("POST", "/admin/drain", 401),
        ):
            async with Raw.to(running) as connection:  # the body is never sent
                head = f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 30000000\r\n\r\n"
                connection.writer.write(head.encode())
                assert (await connection.answer())[0] == status, path


# CORS


def cors_of(response: httpx.Response) -> tuple[list[str], str]:
    return response.headers.get_list("access-control-allow-origin"), response.headers.get("vary", "")


async def test_preflight_requests_are_answered_without_a_key(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, keys=KEYS, cors={"origins": [PAGE]}) as running:
        asked = {"access-control-request-headers": "authorization, x-stainless-os"}
        for path in ("/v1/chat/completions", "/v1/models", f"/v1/models/{MODEL}"):
            response = await running.client.options(path, headers=PREFLIGHT | asked)
            assert (response.status_code, response.content) == (204, b"")
            assert response.headers["access-control-allow-origin"] == PAGE
            assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
            assert response.headers["access-control-allow-methods"] == "GET, POST"
            assert "access-control-allow-credentials" not in response.headers
            refused = await running.client.options(path, headers=PREFLIGHT | {"origin": "https://evil.example"})
            assert (refused.status_code, cors_of(refused)) == (403, ([], "origin"))
        assert running.upstreams["a"].seen == []


async def test_pages_of_allowed_origins_may_read_every_answer(gateway_of: Start) -> None:
    async def engine_with_cors(wire: Wire) -> None:
        if wire.seen.body and wire.seen.json.get("stream"):
            await wire.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\naccess-control-allow-origin: *\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            await wire.chunk(delta("hi") + END)
            await wire.end_stream()
            return
        await wire.json(answer("a"), headers="access-control-allow-origin: *\r\nvary: Origin\r\n")

    page = {"origin": PAGE}
    async with gateway_of(
        {"a": "baseline"}, keys=KEYS, cors={"origins": [PAGE]}, server={"max_body_mib": 0.01}
    ) as running:
        running.upstreams["a"].behaviour = engine_with_cors
        key = bearer("sk-team") | page
        answers = {
            "whole": await running.chat(headers=key),
            "stream": await running.chat(stream=True, headers=key),
            "other": await running.client.get("/version", headers=key),
            "models": await running.client.get("/v1/models", headers=key),
            "no preflight": await running.client.options("/version", headers=page),
            "no key": await running.chat(headers=page),
            "no such path": await running.client.post("/sleep", headers=key),
            "too large": await running.chat("x" * 20_000, headers=key),
        }
        await running.upstreams["a"].die()
        answers["down"] = await running.chat(headers=key)
        assert {name: cors_of(response) for name, response in answers.items()} == dict.fromkeys(
            answers, ([PAGE], "origin")
        )
        statuses = [response.status_code for response in answers.values()]
        assert statuses == [200, 200, 200, 200, 200, 401, 404, 413, 503]
        for response in answers.values():
            assert "retry-after" in response.headers["access-control-expose-headers"]
        other = await running.chat(headers=bearer("sk-team") | {"origin": "https://evil.example"})
        assert cors_of(other) == ([], "origin")
        admin = await running.client.get("/admin/pool", headers=bearer(ADMIN_KEY) | page)
        assert (admin.status_code, cors_of(admin)) == (200, ([], ""))
        admin = await running.client.get("/admin/pool", headers=page)
        assert (admin.status_code, cors_of(admin)) == (401, ([], ""))


async def test_all_origins(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, cors={"origins": ["*"]}) as running:
        response = await running.chat(headers={"origin": "https://any.example"})
        assert cors_of(response) == (["*"], "")
        assert cors_of(await running.chat()) == ([], "")


# Where the gateway connects to


@pytest.mark.slow
async def test_nothing_in_a_request_makes_the_gateway_connect_elsewhere(gateway_of: Start) -> None:
    connections: list[object] = []
    server = await asyncio.start_server(lambda *streams: connections.append(streams), "127.0.0.1", 0)
    elsewhere = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    url = f"http://{elsewhere}"
    async with gateway_of({"a": "baseline"}) as running:
        targets = [f"{url}/v1/chat/completions", f"{url}@h/v1/chat/completions", f"//{elsewhere}/v1/chat/completions"]
        targets += [f"/v1/chat/completions?url={url}", f"@{elsewhere}/v1/chat/completions", f"/{url}/v1/completions"]
        headers = "host x-gateway-backend x-gateway-model x-gateway-method x-forwarded-host x-forwarded-for referer"
        headers += " x-forwarded-server forwarded x-original-url x-rewrite-url x-real-ip location"
        # All at the same time: a connection stays open for a while after a request that was refused.
        answers = [raw(running, target, method) for method in ("POST", "OPTIONS") for target in targets]
        for header in headers.split():
            lines = (f"{header}: {value}\r\n" for value in (url, elsewhere))
            answers += [raw(running, "/v1/chat/completions", extra=line) for line in lines]
        await asyncio.gather(*answers, raw(running, elsewhere, "CONNECT", b""))
        body = {"model": url, "url": url, "base_url": url, "api_base": url, "messages": []}
        await running.client.post("/v1/chat/completions", json=body)
        await running.client.post("/v1/responses", json={"previous_response_id": url, "input": "x"})
        seen = running.upstreams["a"].seen
        assert {request.header("host") for request in seen} == {running.upstreams["a"].url.removeprefix("http://")}
        assert not [request for request in seen if not request.target.startswith("/v1/")]
    server.close()
    assert connections == []
