"""The batch API by OpenAI's own client, in front of scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path

import openai
import pytest

from gateway.rooms.batches import api
from gateway.rooms.batches.lines import MOST_LINE_BYTES, Line, check
from gateway.rooms.batches.notes import Notes
from gateway.rooms.batches.places import ModelPlaces, Places
from gateway.rooms.batches.storage import Storage
from tests.gateway.conftest import MODEL, start_gateway
from tests.gateway.rooms.batches.support import (
    CHAT,
    batches,
    begin,
    client_of,
    ended,
    holds,
    jsonl,
    kept,
    line,
    lines_of,
    until_completed,
)
from tests.support.upstream import Wire, well
from tests.support.waiting import eventually, eventually_async


@pytest.mark.slow
async def test_a_batch_from_its_upload_to_its_output(tmp_path: Path) -> None:
    names = [f"line {number}" for number in range(30)]
    async with batches(tmp_path) as running, client_of(running) as client:
        batch = await begin(client, jsonl(*map(line, names)))
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"a": "b"})
        batch = await ended(client, batch.id)
        assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
        assert batch.error_file_id is None
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == batch.created_at + 86400
        output = await lines_of(client, batch.output_file_id)
        assert sorted(each["custom_id"] for each in output) == sorted(names)
        assert {each["response"]["status_code"] for each in output} == {200}
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in output} <= {"from a", "from b"}
        assert len({each["id"] for each in output}) == len({each["response"]["request_id"] for each in output}) == 30
        assert sum(len(upstream.seen) for upstream in running.upstreams.values()) == 30

        files = await client.files.list()
        assert {file.id for file in files.data} == {batch.input_file_id, batch.output_file_id}
        assert [each.id async for each in await client.batches.list()] == [batch.id]
        file = await client.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.bytes) == ("batch_output", len((await client.files.content(file.id)).content))
        assert await running.counted("gateway_batch_lines_total", model=MODEL, outcome="completed") == 30
        assert {path.stat().st_mode & 0o777 for path in kept(tmp_path)} == {0o600}


async def test_what_is_wrong_with_its_lines_is_said_before_any_runs(tmp_path: Path) -> None:
    wrong = [
        line("a"),
        line("a"),
        line("b", url="/v1/completions"),
        line("c") | {"body": [1]},
        line("d", model="other"),
        line("e", stream=True),
        line("f") | {"method": "GET"},
        {"url": CHAT},
        line("g", model=7),
    ]
    async with batches(tmp_path) as running, client_of(running) as client:
        batch = await begin(client, jsonl(*wrong) + b"{\n[]\n\n")
        batch = await ended(client, batch.id, "failed")
        assert [(each.line, each.code, each.param) for each in batch.errors.data] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_url", "url"),
            (4, "missing_required_parameter", "body"),
            (5, "mismatched_model", "body.model"),
            (6, "invalid_request", "body.stream"),
            (7, "invalid_method", "method"),
            (8, "missing_required_parameter", "custom_id"),
            (9, "missing_required_parameter", "body.model"),
            (10, "invalid_json_line", None),
            (11, "invalid_json_line", None),
        ]
        batch = await begin(client, jsonl(line("a", model="nobody")))
        (error,) = (await ended(client, batch.id, "failed")).errors.data
        assert (error.line, error.code) == (1, "model_not_found")
        assert batch.output_file_id is None
        assert not any(upstream.seen for upstream in running.upstreams.values())


async def test_cancel(tmp_path: Path) -> None:
    lines = jsonl(line("first"), line("held 1"), line("held 2"))
    async with batches(tmp_path, behaviour=holds) as running, client_of(running) as client:
        batch, waiting = await begin(client, lines), await begin(client, lines)
        await eventually(lambda: sum("held" in str(each.body) for up in running.upstreams.values() for each in up.seen))
        assert (await client.batches.cancel(waiting.id)).status == "cancelling"
        assert (await ended(client, waiting.id, "cancelled")).output_file_id is None  # which waited for the other
        assert (await client.batches.cancel(batch.id)).cancelling_at is not None
        batch = await ended(client, batch.id, "cancelled")
        assert batch.cancelling_at <= batch.cancelled_at
        assert [each["custom_id"] for each in await lines_of(client, batch.output_file_id)] == ["first"]
        assert batch.error_file_id is None
        await eventually(lambda: not any(backend.in_flight for backend in running.gateway.pool))
        with pytest.raises(openai.ConflictError, match="it is cancelled"):
            await client.batches.cancel(batch.id)


@pytest.mark.slow
async def test_lines_make_room_for_a_request_and_run_again(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def behave(wire: Wire) -> None:
        if b"line 0" not in wire.seen.body:  # which tells how long lines take
            await released.wait()
        with contextlib.suppress(ConnectionError):  # of those that were given up
            await well(wire)

    names = [f"line {number}" for number in range(8)]
    async with batches(tmp_path, methods={"a": "baseline"}, behaviour=behave) as running, client_of(running) as client:
        backend = running.backend("a")
        batch = await begin(client, jsonl(*map(line, names)))
        await eventually(lambda: backend.in_flight == 2)
        asked = asyncio.create_task(running.chat("mine"))

        async def one_is_given_up() -> bool:
            return await running.counted("gateway_requests_total", outcome="cancelled") == 1

        await eventually_async(one_is_given_up)
        released.set()
        assert (await asked).status_code == 200
        output = await lines_of(client, (await ended(client, batch.id)).output_file_id)
        assert sorted(each["custom_id"] for each in output) == names


@pytest.mark.slow
async def test_what_has_not_run_in_time_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "WINDOW_S", 2)
    lines = jsonl(line("first"), *(line(f"held {number}") for number in range(3)))
    async with batches(tmp_path, behaviour=holds) as running, client_of(running) as client:
        batch = await ended(client, (await begin(client, lines)).id, "expired")
        assert batch.expired_at >= batch.expires_at == batch.created_at + 2
        assert batch.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
        assert [each["custom_id"] for each in await lines_of(client, batch.output_file_id)] == ["first"]
        errors = await lines_of(client, batch.error_file_id)
        assert [each["custom_id"] for each in errors] == ["held 0", "held 1", "held 2"]
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}


async def test_bounds(tmp_path: Path) -> None:
    bounds = {"max_file_mib": 0.001, "max_lines": 2, "max_files_per_key": 3, "max_batches_per_key": 1}
    async with batches(tmp_path, batches=bounds, behaviour=holds) as running, client_of(running) as client:
        with pytest.raises(openai.APIStatusError, match=r"at most 0\.001 MiB") as raised:
            await client.files.create(file=("in.jsonl", b"x" * 2000), purpose="batch")
        assert raised.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("in.jsonl", b"x"), purpose="assistants")
        too_long = await begin(client, jsonl(*map(line, "abc")))
        (error,) = (await ended(client, too_long.id, "failed")).errors.data
        assert (error.code, error.line) == ("too_many_tasks", 3)
        await begin(client, jsonl(line("held")))
        with pytest.raises(openai.RateLimitError, match="1 batches that have not ended"):
            await begin(client, jsonl(line("more")))
        with pytest.raises(openai.RateLimitError, match="has 3 files"):
            await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        for fields in ({"completion_window": "1h"}, {"endpoint": "/v1/audio/speech"}, {"metadata": [1]}, {}):
            body = {"input_file_id": "../x", "endpoint": CHAT, "completion_window": "24h"} | fields
            assert (await running.client.post("/v1/batches", json=body)).status_code == (400 if fields else 404)
        for content in (b"", b"[", b"[]"):
            assert (await running.client.post("/v1/batches", content=content)).status_code == 400
        assert (await running.client.post("/v1/files", content=b"--x")).status_code == 400


async def test_without_the_section_there_are_no_batches() -> None:
    async with start_gateway() as running:
        assert (await running.client.get("/v1/files")).json()["error"]["code"] == "path_closed"


@pytest.mark.slow
async def test_of_two_gateways_one_runs_a_batch_and_the_other_goes_on_with_it(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def behave(wire: Wire) -> None:
        if wire.seen.json["messages"][0]["content"] == "held" and not released.is_set():
            await wire.until_closed()
        else:
            await well(wire)

    names = [*map(str, range(12)), "held", *map(str, range(12, 20))]
    async with AsyncExitStack() as stack, AsyncExitStack() as others:
        first = await stack.enter_async_context(batches(tmp_path, behaviour=behave))  # it takes the lease
        other = await stack.enter_async_context(client_of(first))
        await eventually((tmp_path / "lock").exists)
        second = await others.enter_async_context(batches(tmp_path, behaviour=behave))
        client = await others.enter_async_context(client_of(second))
        batch = await begin(client, jsonl(*map(line, names)))

        def seen() -> list[str]:
            ups = [*first.upstreams.values(), *second.upstreams.values()]
            return [each.json["messages"][0]["content"] for up in ups for each in up.seen]

        await until_completed(other, batch.id, 20)
        assert sorted(seen()) == sorted(names)
        assert not any(upstream.seen for upstream in second.upstreams.values())
        (notes,) = [str(path.relative_to(tmp_path)) for path in kept(tmp_path) if path.suffix == ".notes"]
        storage = Storage(tmp_path)
        assert len([*Notes(storage, notes).answers()]) == 20, "a gateway that is killed loses none of them"
        await stack.aclose()
        storage.append(notes, b'12 + 0123abcd {"id":"batch_req_1","custom_id":"held","resp')  # a machine has failed
        released.set()
        batch = await ended(client, batch.id)
        output = await lines_of(client, batch.output_file_id)
        assert sorted(each["custom_id"] for each in output) == sorted(names)
        assert sorted(seen()) == sorted([*names, "held"])
        assert storage.names("open") == []


def test_lines_are_begun_that_can_end() -> None:
    """Lines of half a second beside a request of 20 ms twice a second: each runs about once."""
    places, ends_s = Places(16, 0.0), dict[Line, float]()
    started = answered = 0
    for now_s in (0.01 * step for step in range(12_000)):
        is_shared, has_come = now_s % 0.5 < 0.02, now_s % 0.5 < 0.01
        for given_up in places.look(now_s, is_shared=is_shared, has_come=has_come):
            places.gave_up(given_up)
            del places.lines[given_up], ends_s[given_up]
        assert len(places.lines) <= 1 or not is_shared
        for over in [each for each, end_s in ends_s.items() if end_s <= now_s]:
            places.answered(0.5)
            answered += 1
            del places.lines[over], ends_s[over]
        while places.may_begin(now_s, begun := Line(started, "a")):
            places.lines[begun], ends_s[begun] = None, now_s + 0.5
            started += 1
    assert answered > 200
    assert started <= answered + 5


def test_a_lock_that_somebody_removes_is_taken_again(tmp_path: Path) -> None:
    ours, others = Storage(tmp_path), Storage(tmp_path)
    assert (ours.hold(), others.hold()) == (True, False)
    (tmp_path / "lock").unlink()
    assert (ours.hold(), others.hold(), ours.hold()) == (True, False, True)
    ours.release()
    assert (others.hold(), ours.hold()) == (True, False)
    for each in (ours, others):
        each.release()


@pytest.mark.slow
def test_a_line_at_a_time_is_held(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    lines = (jsonl(line(str(number), user="x" * 50_000)) for number in range(1000))
    storage.write("in.jsonl", {}, lines)
    assert (tmp_path / "in.jsonl").stat().st_size > 50_000_000
    tracemalloc.start()
    try:
        assert check(storage.lines("in.jsonl", MOST_LINE_BYTES), CHAT, 5000) == (1000, MODEL, [])
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


async def test_of_replicas_that_have_left_nothing_is_kept() -> None:
    async with start_gateway() as running:
        places, line = ModelPlaces(running.gateway, MODEL, 1), Line(0, "a")
        places.requests[line] = None
        places.sent(line, "left")
        places.look()
        assert places.at.keys() == {"a", "b", "left"}, "the line is there yet"
        places.leave(line)
        places.look()
        assert places.at.keys() == {"a", "b"}
