"""Requests to healthy backends, and to backends that die, hang, disconnect or answer garbage."""

from __future__ import annotations

import json
import os
import resource
from itertools import pairwise

import pytest

from backends.health import State
from tests.gateway.conftest import MODEL, Start
from tests.support.upstream import Wire, delta, well
from tests.support.waiting import stays


async def test_bytes_are_passed_on_unchanged_in_both_directions(gateway_of: Start) -> None:
    sent = (
        b'{ "model":"m",  "messages": [{"role":"user","content":"\\u00e9"}], "vllm_xargs": {"draft_tokens": 0}, "n":1 }'
    )
    answered = b'{"id":"x", "choices": [{"message": {}}],\n  "unknown_field":  1.50,"usage":null}'

    async def odd(wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Odd: Yes\r\ncontent-length: %d\r\n\r\n%s"
            % (len(answered), answered)
        )

    async with gateway_of({"a": "baseline"}, behaviour=odd) as running:
        response = await running.client.post("/v1/chat/completions?q=%2Fx&y", content=sent, headers={"x-mine": "kept"})
        assert response.content == answered
        assert response.headers["x-odd"] == "Yes"
        seen = running.upstreams["a"].seen[-1]
        assert seen.body == sent
        assert seen.target == "/v1/chat/completions?q=%2Fx&y"
        assert seen.header("x-mine") == "kept"
        assert seen.header("host") == running.upstreams["a"].url.removeprefix("http://")
        assert len([1 for name, _ in seen.headers if name.lower() == "content-length"]) == 1


async def test_no_client_can_take_the_id_of_anothers_request(gateway_of: Start) -> None:
    async def refuses_duplicates(wire: Wire) -> None:
        own = wire.seen.header("x-request-id")
        earlier = [seen.header("x-request-id") for seen in wire.upstream.seen[:-1]]
        await (wire.json({"error": {"message": "duplicate id"}}, 400) if own in earlier else well(wire))

    async with gateway_of({"a": "baseline"}, behaviour=refuses_duplicates) as running:
        generated = [(await running.chat()).headers["x-request-id"] for _ in range(40)]
        assert len(set(generated)) == 40
        numbers = sorted(int(each, 16) for each in generated)
        assert min(later - earlier for earlier, later in pairwise(numbers)) > 2**64, "none leads to another"
        for _ in range(2):
            response = await running.chat(headers={"X-Request-Id": generated[0]})
            assert (response.status_code, response.headers["x-request-id"]) == (200, generated[0])
            assert (running.upstreams["a"].seen[-1].header("x-request-id") or "").endswith(f"-{generated[0]}")


@pytest.mark.slow
async def test_a_slow_client_pauses_the_backend(gateway_of: Start) -> None:
    sent = 0

    async def flood(wire: Wire) -> None:
        nonlocal sent
        await wire.begin_stream()
        for _ in range(2000):
            await wire.chunk(delta("x" * 16_000))
            sent += 16_000
        await wire.end_stream()

    async with gateway_of({"a": "baseline"}, behaviour=flood, timeouts={"idle_s": 30.0}) as running:
        body = {"model": MODEL, "messages": [], "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
            await running.until(lambda: any(each._slow_since_s for each in running.server.connections))
            await stays(lambda: 0 < sent < 20_000_000, 0.3)
            size = 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
        assert size > 2000 * 16_000


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_for_a_stored_response_go_to_its_backend(gateway_of: Start, stream: bool) -> None:
    async def respond(wire: Wire) -> None:
        name = f"resp_{wire.upstream.name}{len(wire.upstream.seen)}"
        stored = json.dumps({"id": name, "object": "response", "output": []})
        if stream:
            event = f'event: response.created\ndata: {{"type": "response.created", "response": {stored}}}\n\n'
            await wire.stream(event.encode())
        else:
            await wire.json(json.loads(stored))

    async with gateway_of() as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = respond
        for name in ("b", "a"):
            first = {"model": MODEL, "input": "x", "stream": stream}
            response = await running.client.post("/v1/responses", json=first, headers={"x-gateway-backend": name})
            assert f"resp_{name}" in response.text
            response_id = f"resp_{name}{len(running.upstreams[name].seen)}"
            for _ in range(3):
                again = await running.client.post("/v1/responses", json={**first, "previous_response_id": response_id})
                assert again.headers["x-gateway-backend"] == name
                assert again.headers["x-gateway-policy"] == "affinity"
                read = await running.client.get(f"/v1/responses/{response_id}")
                assert read.headers["x-gateway-backend"] == name
                cancelled = await running.client.post(f"/v1/responses/{response_id}/cancel")
                assert cancelled.headers["x-gateway-backend"] == name
        unknown = {"model": MODEL, "input": "x", "previous_response_id": "resp_unknown"}
        assert (await running.client.post("/v1/responses", json=unknown)).status_code == 200


async def test_a_gateway_out_of_file_descriptors_ejects_no_backend(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline", "b": "baseline"}, health={"interval_s": 60.0}) as running:
        assert (await running.client.get("/health")).status_code == 200  # opens the client's connection
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = [os.dup(0)]
        while spare[-1] <= highest:  # occupy the free numbers below the limit
            spare.append(os.dup(0))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1, limits[1]))
            response = await running.chat()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for number in spare:
                os.close(number)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "backend_exhausted"
        assert [running.backend(name).health.state for name in "ab"] == [State.UP, State.UP]
        assert (await running.chat()).status_code == 200
