"""What happens to a request when backends are well, and when they die, hang, break off or talk nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time

import httpx
import pytest

from backends.backend import State
from tests.gateway.conftest import MODEL, Start
from tests.support.upstream import Wire, delta, well


async def test_bytes_cross_untouched_in_both_directions(gateway_of: Start) -> None:
    sent = b'{ "model":"m",  "messages": [{"role":"user","content":"\\u00e9"}], "vllm_xargs": {"a": 1}, "user":"u" }'
    got = b'{"id":"x", "choices": [],\n  "unknown_field":  1.50,"usage":null}'

    async def odd(wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Odd: Yes\r\ncontent-length: %d\r\n\r\n%s"
            % (len(got), got)
        )

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = odd
        response = await running.client.post("/v1/chat/completions?q=%2Fx&y", content=sent, headers={"x-mine": "kept"})
        assert response.content == got
        assert response.headers["x-odd"] == "Yes"
        seen = running.upstreams["a"].seen[-1]
        assert seen.body == sent
        assert seen.target == "/v1/chat/completions?q=%2Fx&y"
        assert seen.header("x-mine") == "kept"
        assert seen.header("host") == running.upstreams["a"].url.removeprefix("http://")
        assert len([1 for name, _ in seen.headers if name.lower() == "content-length"]) == 1


async def test_the_answer_says_who_gave_it_and_why(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        response = await running.chat()
        assert response.json()["choices"][0]["message"]["content"] == "from a"
        assert response.headers["x-gateway-backend"] == "a"
        assert response.headers["x-gateway-method"] == "baseline"
        assert response.headers["x-gateway-policy"] == "round_robin"
        assert response.headers["x-gateway-reason"]
        assert len(response.headers.get_list("date")) == 1


async def test_request_id_is_kept_or_made_and_echoed(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        response = await running.chat(headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert running.upstreams["a"].seen[-1].header("x-request-id") == "mine-1"
        response = await running.chat()
        made = response.headers["x-request-id"]
        assert len(made) == 32
        assert running.upstreams["a"].seen[-1].header("x-request-id") == made


async def test_each_chunk_of_a_stream_goes_on_as_it_comes(gateway_of: Start) -> None:
    release = asyncio.Event()

    async def in_two(wire: Wire) -> None:
        await wire.begin_stream()
        await wire.chunk(delta("one"))
        await release.wait()
        await wire.chunk(delta("two") + b"data: [DONE]\n\n")
        await wire.end_stream()

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = in_two
        body = {"model": MODEL, "messages": [], "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = response.aiter_raw()
            assert await anext(chunks) == delta("one")  # although the second is not even made yet
            release.set()
            rest = b"".join([chunk async for chunk in chunks])
            assert rest == delta("two") + b"data: [DONE]\n\n"


async def test_an_event_cut_in_two_reads_arrives_whole(gateway_of: Start) -> None:
    async def cut(wire: Wire) -> None:
        await wire.begin_stream()
        event = delta("whole")
        await wire.chunk(event[:20])
        await asyncio.sleep(0.05)
        await wire.chunk(event[20:] + b"data: [DONE]\n\n")
        await wire.end_stream()

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = cut
        response = await running.chat(stream=True)
        assert response.content == delta("whole") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_engines_work(gateway_of: Start, stream: bool) -> None:
    started = asyncio.Event()

    async def slow(wire: Wire) -> None:
        if stream:
            await wire.begin_stream()
            await wire.chunk(delta("one"))
        started.set()
        await wire.until_closed()

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = slow
        asked = asyncio.create_task(running.chat(stream=stream))
        await started.wait()
        before_s = time.monotonic()
        asked.cancel()
        await running.until(lambda: running.upstreams["a"].aborted == 1)
        assert time.monotonic() - before_s < 1.0
        await running.until(lambda: running.backend("a").in_flight == 0)
        assert running.backend("a").state is State.UP  # that was not the backend's fault
        page = (await running.client.get("/metrics")).text
        assert 'gateway_requests_total{backend="a",method="baseline",model="m",outcome="cancelled"} 1.0' in page


async def refuse_quickly(wire: Wire) -> None:
    wire.reset()


async def talk_nonsense(wire: Wire) -> None:
    await wire.send(b"HELLO THIS IS NOT HTTP\r\n\r\n")


async def answer_html(wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\n<p>hi")


async def answer_broken_json(wire: Wire) -> None:
    await wire.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"id": "x')


async def answer_half(wire: Wire) -> None:
    await wire.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"id": "x')
    wire.reset()


async def stream_nothing(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.end_stream()


async def stream_error_first(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.chunk(b'data: {"error": {"message": "busy", "type": "Service Unavailable", "code": 503}}\n\n')
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end_stream()


async def answer_500(wire: Wire) -> None:
    await wire.json({"error": {"message": "boom", "code": 500}}, 500)


async def answer_503(wire: Wire) -> None:
    await wire.json({"error": {"message": "busy", "code": 503}}, 503)


async def hang(wire: Wire) -> None:
    await wire.until_closed()


FAULTS = [
    refuse_quickly,
    talk_nonsense,
    answer_html,
    answer_broken_json,
    answer_half,
    stream_nothing,
    stream_error_first,
    answer_500,
    answer_503,
    hang,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_of_which_nothing_was_answered_goes_to_another(
    gateway_of: Start, fault: object, stream: bool
) -> None:
    async with gateway_of(policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = fault  # type: ignore[assignment]
        response = await running.chat(stream=stream)
        assert response.status_code == 200
        assert response.headers["x-gateway-backend"] == "b"
        assert response.headers["x-gateway-retried-from"] == "a"
        assert b"busy" not in response.content
        assert len(running.upstreams["b"].seen) == 1
        assert running.upstreams["b"].seen[0].body == running.upstreams["a"].seen[0].body
        assert running.backend("a").in_flight == running.backend("b").in_flight == 0


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (refuse_quickly, 502),
        (talk_nonsense, 502),
        (answer_html, 502),
        (answer_500, 500),
        (answer_503, 503),
        (hang, 504),
    ],
)
async def test_a_fault_without_another_backend_is_told_in_openais_shape(
    gateway_of: Start, fault: object, status: int
) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = fault  # type: ignore[assignment]
        response = await running.chat()
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert running.backend("a").in_flight == 0


async def test_it_is_sent_twice_at_most(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline", "b": "baseline", "c": "baseline"}) as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = refuse_quickly
        response = await running.chat()
        assert response.status_code == 502
        assert sum(len(upstream.seen) for upstream in running.upstreams.values()) == 2


async def test_a_dead_backend_is_passed_over_and_comes_back(gateway_of: Start) -> None:
    async with gateway_of() as running:
        await running.upstreams["a"].die()
        answers = [await running.chat() for _ in range(6)]
        assert {one.status_code for one in answers} == {200}
        assert {one.headers["x-gateway-backend"] for one in answers} == {"b"}
        assert running.backend("a").state is State.DOWN
        await running.upstreams["a"].come_back()
        await running.until_up("a")
        again = {(await running.chat()).headers["x-gateway-backend"] for _ in range(6)}
        assert again == {"a", "b"}


async def test_all_dead_is_503_with_retry_after(gateway_of: Start) -> None:
    async with gateway_of() as running:
        for upstream in running.upstreams.values():
            await upstream.die()
        await running.until(lambda: not running.gateway.pool.up(MODEL))
        response = await running.chat()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "a is down" in response.json()["error"]["message"]
        assert (await running.client.get("/readyz")).status_code == 503
        assert (await running.client.get("/health")).status_code == 200


async def test_a_hung_backend_is_taken_out_and_what_waits_there_goes_on_elsewhere(gateway_of: Start) -> None:
    async with gateway_of(timeouts={"first_byte_s": 60.0}, policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = hang
        waiting = asyncio.create_task(running.chat())
        await running.until(lambda: len(running.upstreams["a"].seen) == 1)
        running.upstreams["a"].health_hangs = True
        response = await waiting
        assert response.headers["x-gateway-backend"] == "b"
        assert running.backend("a").state is State.DOWN


async def test_garbage_takes_a_backend_out_for_a_while(gateway_of: Start) -> None:
    async with gateway_of(policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = talk_nonsense
        assert (await running.chat()).headers["x-gateway-backend"] == "b"
        assert running.backend("a").state is State.EJECTED
        running.upstreams["a"].behaviour = well
        await running.until_up("a")
        assert (await running.chat()).headers["x-gateway-backend"] == "a"


async def break_mid_stream(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.chunk(delta("one"))
    await wire.chunk(delta("two")[:25])
    wire.reset()


async def stall_mid_stream(wire: Wire) -> None:
    await wire.begin_stream()
    await wire.chunk(delta("one"))
    await wire.until_closed()


@pytest.mark.parametrize("fault", [break_mid_stream, stall_mid_stream])
async def test_a_stream_that_had_begun_ends_with_an_error_event(gateway_of: Start, fault: object) -> None:
    async with gateway_of(policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = fault  # type: ignore[assignment]
        response = await running.chat(stream=True)
        events = response.content.split(b"\n\n")
        assert events[0] + b"\n\n" == delta("one")
        error = json.loads(events[1].removeprefix(b"data: "))["error"]  # the cut event was never begun
        assert "not complete" in error["message"]
        assert events[2:] == [b"data: [DONE]", b""]
        assert running.upstreams["b"].seen == []


async def test_the_others_notice_nothing(gateway_of: Start) -> None:
    async with gateway_of() as running:

        async def long(wire: Wire) -> None:
            await wire.begin_stream()
            for number in range(20):
                await wire.chunk(delta(str(number)))
                await asyncio.sleep(0.02)
            await wire.chunk(b"data: [DONE]\n\n")
            await wire.end_stream()

        running.upstreams["b"].behaviour = long
        running.upstreams["a"].behaviour = break_mid_stream
        streams = await asyncio.gather(*(running.chat(stream=True) for _ in range(8)))
        by_backend = {name: [one for one in streams if one.headers["x-gateway-backend"] == name] for name in "ab"}
        assert by_backend["b"]
        for one in by_backend["b"]:
            assert one.content.count(b"\n\n") == 21
            assert b"error" not in one.content


async def test_keep_alive_races_cost_no_request(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].close_after_answer = True  # unannounced, as the connection lies idle
        statuses = [(await running.chat()).status_code for _ in range(50)]
        assert statuses == [200] * 50


async def test_connections_are_reused(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline"}, health={"interval_s": 60.0}) as running:
        before = running.upstreams["a"].connections
        for _ in range(20):
            await running.chat()
        assert running.upstreams["a"].connections == before + 1


async def test_a_slow_reader_holds_the_engine_back_not_the_memory(gateway_of: Start) -> None:
    sent = 0

    async def flood(wire: Wire) -> None:
        nonlocal sent
        await wire.begin_stream()
        for _ in range(2000):
            await wire.chunk(delta("x" * 16_000))
            sent += 16_000
        await wire.end_stream()

    async with gateway_of({"a": "baseline"}, timeouts={"idle_s": 30.0}) as running:
        running.upstreams["a"].behaviour = flood
        body = {"model": MODEL, "messages": [], "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
            previous = -1
            async with asyncio.timeout(10):
                while sent != previous:  # nobody reads: it must come to rest
                    previous = sent
                    await asyncio.sleep(0.3)
            assert 0 < sent < 20_000_000
            size = 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
        assert size > 2000 * 16_000


async def test_head_and_other_paths_pass_through(gateway_of: Start) -> None:
    async def head(wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\nx-is: head\r\n\r\n")

    async def version(wire: Wire) -> None:
        await wire.json({"path": wire.seen.target, "method": wire.seen.method})

    async with gateway_of({"a": "baseline"}) as running:
        running.upstreams["a"].behaviour = head
        response = await running.client.head("/version")
        assert (response.status_code, response.headers["x-is"], response.content) == (200, "head", b"")
        running.upstreams["a"].behaviour = version
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
            response = await running.client.request(method, "/any/path%20of?vllm=1")
            assert response.json() == {"path": "/any/path%20of?vllm=1", "method": method}


async def test_what_may_have_had_its_effect_is_not_sent_again(gateway_of: Start) -> None:
    async with gateway_of(policy={"name": "static", "backend": "a"}) as running:
        running.upstreams["a"].behaviour = refuse_quickly
        response = await running.client.post("/v1/load_lora_adapter", json={"model": MODEL})
        assert response.status_code == 502
        assert running.upstreams["b"].seen == []


async def test_baseline_only_parameters_go_to_a_baseline(gateway_of: Start) -> None:
    async with gateway_of() as running:
        for field in ({"min_p": 0.1}, {"logit_bias": {"1": 5}}):
            chosen = {(await running.chat(**field)).headers["x-gateway-backend"] for _ in range(4)}
            assert chosen == {"a"}
        await running.upstreams["a"].die()
        await running.until(lambda: running.backend("a").state is State.DOWN)
        response = await running.chat(min_p=0.1)
        assert response.status_code == 503
        assert "min_p" in response.json()["error"]["message"]


async def test_the_request_may_choose(gateway_of: Start) -> None:
    async with gateway_of() as running:
        for name, method in (("a", "baseline"), ("b", "ngram")):
            for routing_headers in ({"x-gateway-backend": name}, {"x-gateway-method": method}):
                response = await running.chat(headers=routing_headers)
                assert response.headers["x-gateway-backend"] == name
                assert response.headers["x-gateway-policy"] == "override"
        response = await running.chat(headers={"x-gateway-backend": "nope"})
        assert response.status_code == 400
        assert "a (baseline), b (ngram)" in response.json()["error"]["message"]


async def test_gateways_own_headers_do_not_reach_the_engine(gateway_of: Start) -> None:
    async with gateway_of() as running:
        await running.chat(headers={"x-gateway-backend": "a", "x-gateway-workload": "chat"})
        assert not [name for name, _ in running.upstreams["a"].seen[-1].headers if name.lower().startswith("x-gateway")]


async def read_stream(url: str, started: asyncio.Event) -> bytes:
    """Read a stream over a client of its own, which outlives the gateway's."""
    body = {"model": MODEL, "messages": [], "stream": True}
    got = b""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20.0) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                got += chunk
                started.set()
    return got


async def test_what_was_under_way_ends_when_the_gateway_stops(gateway_of: Start) -> None:
    release = asyncio.Event()

    async def held(wire: Wire) -> None:
        await wire.begin_stream()
        await wire.chunk(delta("one"))
        await release.wait()
        await wire.chunk(delta("two") + b"data: [DONE]\n\n")
        await wire.end_stream()

    started = asyncio.Event()
    async with gateway_of({"a": "baseline"}, server={"drain_s": 10.0}) as running:
        running.upstreams["a"].behaviour = held
        reading = asyncio.create_task(read_stream(running.url, started))
        await started.wait()
        asyncio.get_running_loop().call_later(0.5, release.set)
    # the block has ended: the gateway was told to drain and has stopped
    assert await reading == delta("one") + delta("two") + b"data: [DONE]\n\n"


async def test_what_does_not_end_in_time_is_told_so(gateway_of: Start) -> None:
    async def endless(wire: Wire) -> None:
        await wire.begin_stream()
        await wire.chunk(delta("one"))
        await wire.until_closed()

    started = asyncio.Event()
    async with gateway_of({"a": "baseline"}, server={"drain_s": 0.2}, timeouts={"idle_s": 60.0}) as running:
        running.upstreams["a"].behaviour = endless
        reading = asyncio.create_task(read_stream(running.url, started))
        await started.wait()
    assert b"The gateway is stopping" in await reading
    assert running.upstreams["a"].aborted == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_refers_to_a_stored_response_goes_where_it_is(gateway_of: Start, stream: bool) -> None:
    async def respond(wire: Wire) -> None:
        made = json.dumps({"id": f"resp_{wire.upstream.name}{len(wire.upstream.seen)}", "object": "response"})
        if stream:
            await wire.begin_stream()
            event = f'event: response.created\ndata: {{"type": "response.created", "response": {made}}}\n\n'
            await wire.chunk(event.encode())
            await wire.end_stream()
        else:
            await wire.json(json.loads(made))

    async with gateway_of() as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = respond
        for name in ("b", "a"):
            first = {"model": MODEL, "input": "x", "stream": stream}
            made = await running.client.post("/v1/responses", json=first, headers={"x-gateway-backend": name})
            assert f"resp_{name}" in made.text
            response_id = f"resp_{name}{len(running.upstreams[name].seen)}"
            for _ in range(3):
                again = await running.client.post("/v1/responses", json={**first, "previous_response_id": response_id})
                assert again.headers["x-gateway-backend"] == name
                assert again.headers["x-gateway-policy"] == "affinity"
                got = await running.client.get(f"/v1/responses/{response_id}")
                assert got.headers["x-gateway-backend"] == name
                cancelled = await running.client.post(f"/v1/responses/{response_id}/cancel")
                assert cancelled.headers["x-gateway-backend"] == name
        unknown = {"model": MODEL, "input": "x", "previous_response_id": "resp_unknown"}
        assert (await running.client.post("/v1/responses", json=unknown)).status_code == 200


async def test_a_gateway_without_files_left_blames_no_backend(gateway_of: Start) -> None:
    async with gateway_of({"a": "baseline", "b": "baseline"}, health={"interval_s": 60.0}) as running:
        assert (await running.client.get("/health")).status_code == 200  # opens the client's connection
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = [os.dup(0)]
        while spare[-1] <= highest:  # fill the numbers that are free below, which a limit would still give out
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
        assert [running.backend(name).state for name in "ab"] == [State.UP, State.UP]
        assert (await running.chat()).status_code == 200
