"""What one key, one line, one object or one engine does to batches, and that it does nothing to others."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.config.pool_file import PoolFile
from gateway.config.settings.keys import KeySettings
from gateway.rooms.batches import api, room
from gateway.rooms.batches.line_request import Answer
from gateway.rooms.batches.storage import Storage
from gateway.routing.keys import digest
from gateway.service.change import prepare
from gateway.service.replicas import plan
from tests.gateway.conftest import ADMIN_KEY, MODEL, Running
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
from tests.support.upstream import Wire, answer, hang, well
from tests.support.waiting import stays


def keys_of(*names: str, **more: Any) -> list[KeySettings]:
    """Return keys whose names are those of their places, as in a list without names."""
    return [KeySettings(name=f"key-{number}", key=f"sk-{name}", **more) for number, name in enumerate(names, 1)]


async def reload(running: Running, keys: list[KeySettings]) -> None:
    raw = running.gateway.settings.model_dump()
    for model in raw["models"].values():
        model["policy"] = {"name": model["policy"]["name"]}
    settings = PoolFile.model_validate(raw | {"keys": [key.model_dump() for key in keys]})
    (await prepare(running.gateway, settings, plan(settings, Path()).backends, digest(ADMIN_KEY))).commit()


def raw_line(name: str, body: bytes) -> bytes:
    return b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}\n' % (name.encode(), CHAT.encode(), body)


def with_field(name: str, value: bytes) -> bytes:
    return raw_line(name, b'{"model":"m","messages":[{"role":"user","content":"%b"}],"x":%b}' % (name.encode(), value))


def seen_of(running: Running) -> Counter[str]:
    """Return how often each line was sent."""
    bodies = [each.body.decode("utf-8", "replace") for up in running.upstreams.values() for each in up.seen]
    return Counter(body.partition('"content":')[2].split('"')[1] for body in bodies)


async def answers_of(client: openai.AsyncOpenAI, batch: Any) -> dict[str, dict[str, Any]]:
    """Return what is written of each line, which is one answer."""
    files = [each for each in (batch.output_file_id, batch.error_file_id) if each]
    answers = [each for file_id in files for each in await lines_of(client, file_id)]
    assert len({each["custom_id"] for each in answers}) == len(answers)
    return {each["custom_id"]: each for each in answers}


@pytest.mark.slow
async def test_another_key_sees_nothing_whatever_names_reloads_give(tmp_path: Path) -> None:
    """The names are those of places, so that a reload gives the name of one key to the other."""
    async with batches(tmp_path, keys=keys_of("ours", "theirs", "third")) as running:
        async with client_of(running, "sk-ours") as ours, client_of(running, "sk-theirs") as theirs:
            batch = await ended(ours, (await begin(ours, jsonl(line("a")))).id)
            assert await running.counted("gateway_key_tokens_total", key="key-1 batch") == 10
            for order in (("ours", "theirs"), ("theirs", "ours")):
                await reload(running, keys_of(*order))
                for attempt in (
                    theirs.files.retrieve(batch.input_file_id),
                    theirs.files.content(batch.output_file_id),
                    theirs.files.delete(batch.input_file_id),
                    theirs.batches.retrieve(batch.id),
                    theirs.batches.cancel(batch.id),
                    theirs.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await attempt
                assert (await theirs.files.list()).data == (await theirs.batches.list()).data == []
                assert len((await ours.files.list()).data) == 2
                assert len(await lines_of(ours, batch.output_file_id)) == 1
        async with client_of(running) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.create(file=("in.jsonl", b"{}"), purpose="batch")


@pytest.mark.slow
async def test_a_batch_whose_key_is_gone_fails_and_never_runs_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_KEY_COMES_S", 0.5)
    async with batches(tmp_path, keys=keys_of("a"), behaviour=hang) as running, client_of(running, "sk-a") as client:
        batch = await begin(client, jsonl(line("held"), line("next")))
        await running.until(lambda: seen_of(running).total())
        await reload(running, keys_of("b"))
        async with client_of(running, "sk-b") as other:
            assert (await other.batches.list()).data == []
            with pytest.raises(openai.NotFoundError):
                await other.batches.cancel(batch.id)
            await running.until(lambda: not Storage(tmp_path).names("open"))
        before = seen_of(running)
        await reload(running, keys_of("b", "a"))
        (error,) = (await ended(client, batch.id, "failed")).errors.data
        assert (error.code, seen_of(running)) == ("invalid_api_key", before)


async def test_bodies_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    async with batches(tmp_path) as running:
        for path, size in (("/v1/batches", (1 << 16) + 1), ("/v1/files", 40 << 20)):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
            head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n"
            writer.write(f"{head}x".encode())  # a byte of the body
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()

        async def chunks() -> Any:
            for _ in range(30):
                yield b"[]," * 350_000

        response = await running.client.post("/v1/batches", content=chunks())  # of a length that is not announced
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        deep = b'{"metadata":' + b'{"a":' * 900 + b"1" + b"}" * 901
        fields = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": [[[]]]}
        for body in (deep, b"[" * 1030, json.dumps(fields).encode(), b'{"a":"\\ud800"}'):
            assert (await running.client.post("/v1/batches", content=body)).status_code in {400, 404, 413}


@pytest.mark.slow
async def test_an_error_of_a_line_is_that_lines(tmp_path: Path) -> None:
    poison = {
        **{
            f"deep-{depth}": with_field(f"deep-{depth}", b"[" * depth + b"]" * depth)
            for depth in (255, 1000, 1024, 3000)
        },
        "surrogate": with_field("surrogate", b'"\\ud800"'),
        "nan": with_field("nan", b"NaN"),
        "infinite": with_field("infinite", b"1e999"),
        "nul": with_field("nul", b'"\x00"'),
        "seed": with_field("seed", b"12345678901234567890123456"),
        "long": with_field("long", b'"%b"' % (b"y" * (5 << 20))),
        "too-long": with_field("too-long", b'"%b"' % (b"y" * (9 << 20))),
        "values": with_field("values", b"[" + b"[]," * 2_000_000 + b"[]]"),
    }
    refused = {"deep-1000", "deep-1024", "deep-3000", "surrogate", "nan", "infinite", "nul", "too-long", "values"}

    async def behave(wire: Wire) -> None:
        if b'"broken"' in wire.seen.body:
            await wire.json({"error": {"message": "oh", "code": 500}}, 500)
        elif b'"wrong"' in wire.seen.body:
            await wire.json({"error": {"message": "no", "code": 400}}, 400)
        elif b'"deep-answer"' in wire.seen.body:
            nested = json.dumps(answer("a")).encode()[:-1] + b',"x":' + b"[" * 900 + b"]" * 900 + b"}"
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            await wire.send(head % len(nested) + nested)
        else:
            await wire.json(answer("a"))  # whatever it may be

    good = [line(f"good-{number}") for number in range(5)] + [line("broken"), line("wrong"), line("deep-answer")]
    content = jsonl(*good[:3]) + b"".join(poison.values()) + jsonl(*good[3:])
    async with batches(tmp_path, behaviour=behave) as running, client_of(running) as client:
        batch = await ended(client, (await begin(client, content)).id)
        answers = await answers_of(client, batch)
        assert answers.keys() == poison.keys() | {each["custom_id"] for each in good}
        failed = {each["custom_id"]: each["response"] for each in await lines_of(client, batch.error_file_id)}
        assert failed.keys() == refused | {"broken", "wrong"}
        assert (failed["wrong"]["status_code"], failed["wrong"]["body"]["error"]["message"]) == (400, "no")
        counts = seen_of(running)
        assert counts.keys() == answers.keys() - refused
        assert max(counts.values()) <= 3
        bodies = [each.body for up in running.upstreams.values() for each in up.seen]
        assert sum(b'"x":12345678901234567890123456' in body for body in bodies) == 1


def test_what_may_be_otherwise_another_time_is_not_the_end_of_a_line() -> None:
    answers = [Answer(status, b"", "", "a") for status in (408, 429, 503, 401, 404, 500, 0, 400, 200)]
    assert [each.is_refusal for each in answers] == [True] * 3 + [False] * 6
    assert [each.is_final for each in answers] == [False] * 7 + [True] * 2
    assert Answer(404, b"", "", "").is_final, "the gateway itself says so"


@pytest.mark.slow
async def test_a_line_that_is_always_refused_holds_up_nobody(tmp_path: Path) -> None:
    async def behave(wire: Wire) -> None:
        if b"refused" in wire.seen.body:
            await wire.json({"error": {"message": "wait", "code": 429}}, 429)
        else:
            await asyncio.sleep(0.05)
            await well(wire)

    async with batches(tmp_path, keys=keys_of("a", "b"), methods={"a": "baseline"}, behaviour=behave) as running:
        async with client_of(running, "sk-a") as poison, client_of(running, "sk-b") as other:
            names = [f"{number}" for number in range(200)]
            batch = await begin(poison, jsonl(line("refused"), *map(line, names)))
            began_s = time.monotonic()
            await ended(other, (await begin(other, jsonl(*map(line, names[:20])))).id)
            assert time.monotonic() - began_s < 30.0

            await until_completed(poison, batch.id, 200)
            assert seen_of(running)["refused"] <= 5  # its pauses grow
            await poison.batches.cancel(batch.id)
            assert len(await answers_of(poison, await ended(poison, batch.id, "cancelled"))) == 200


@pytest.mark.slow
async def test_what_cannot_be_read_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with batches(tmp_path) as running, client_of(running) as client:
        first = await ended(client, (await begin(client, jsonl(line("first")))).id)
        owner = tmp_path / "anonymous"
        gone = f"batch_{'0' * 32}"
        broken = f"file-{'1' * 32}"
        for path in (
            tmp_path / "open" / "stray",
            tmp_path / "open" / f"{owner.name}.{gone}",
            owner / "files" / "stray",
            owner / "files" / broken,
            owner / "batches" / "stray",
            owner / "batches" / gone,
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{" if path.name == gone else b"")
        for name in ("folder", f"{owner.name}.batch_{'3' * 32}.notes"):
            (tmp_path / "open" / name).mkdir()
        os.mkfifo(owner / "files" / f"file-{'2' * 32}")
        batch = await begin(client, jsonl(line("second"), line("third")))
        assert (await ended(client, batch.id)).request_counts.completed == 2
        assert [each.id for each in (await client.batches.list()).data] == [batch.id, first.id]
        assert len((await client.files.list()).data) == 4
        assert await running.counted("gateway_batch_objects_set_aside_total", kind="open") == 3
    assert sum("open/stray cannot be read" in each.message for each in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", ["failed", "expired"])
async def test_a_batch_whose_file_is_taken_away_ends_and_keeps_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    async with batches(tmp_path, behaviour=holds) as running, client_of(running) as client:
        batch = await begin(client, jsonl(line("quick"), line("held")))
        await until_completed(client, batch.id, 1)
    file = tmp_path / "anonymous" / "files" / batch.input_file_id
    file.unlink()
    if status == "failed":
        file.mkdir()  # something else is in its place
    monkeypatch.setattr(api, "WINDOW_S", 0 if status == "expired" else api.WINDOW_S)
    async with batches(tmp_path) as running, client_of(running) as client:
        batch = await ended(client, batch.id, status)
        told = [each.code for each in batch.errors.data] if batch.errors else []
        assert told == (["file_not_found"] if status == "failed" else [])
        assert (await answers_of(client, batch)).keys() == {"quick"}


@pytest.mark.slow
async def test_a_full_place_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    async with batches(tmp_path, batches={"max_total_mib": 1.0}) as running, client_of(running) as client:
        file = await client.files.create(file=("in.jsonl", b"x" * 900_000), purpose="batch")
        batch = await begin(client, jsonl(line("before")))
        await ended(client, batch.id)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
        assert (raised.value.status_code, raised.value.code) == (507, "insufficient_storage")
        assert len((await client.files.list()).data) == 3
        await client.files.delete(file.id)
        await client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
    assert not [path for path in kept(tmp_path) if "~" in path.name]


@pytest.mark.slow
async def test_a_run_waits_while_its_place_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that fails is tried again; no line runs twice for it."""
    append, is_full = Storage.append, {"now": False}

    def fails(self: Storage, path: str, data: bytes) -> None:
        if is_full["now"]:
            raise OSError(28, "No space left on device")
        append(self, path, data)

    monkeypatch.setattr(Storage, "append", fails)
    released = asyncio.Event()

    async def behave(wire: Wire) -> None:
        await released.wait()
        await well(wire)

    async with batches(tmp_path, behaviour=behave) as running, client_of(running) as client:
        batch = await begin(client, jsonl(*map(line, "abcd")))
        await running.until(lambda: seen_of(running).total())
        is_full["now"] = True
        released.set()
        await stays(lambda: seen_of(running).total() <= 2, 1.0)
        is_full["now"] = False
        assert (await ended(client, batch.id)).request_counts.completed == 4
        assert seen_of(running) == Counter("abcd")
    assert "cannot write to its disk: No space left on device; free space there" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.slow
async def test_a_batch_that_failed_its_checks_stays_so_if_its_end_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = Storage.write, list[str]()

    def fails_once(self: Storage, path: str, *of: Any) -> None:
        if "/batches/" in path and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        write(self, path, *of)

    monkeypatch.setattr(Storage, "write", fails_once)
    async with batches(tmp_path) as running, client_of(running) as client:
        batch = await ended(client, (await begin(client, jsonl(line("a"), line("b", stream=True)))).id, "failed")
        assert [each.line for each in batch.errors.data] == [2]
        assert refused
        assert not seen_of(running)


@pytest.mark.slow
async def test_a_batch_that_a_folder_does_not_list_for_a_moment_keeps_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ext4, what is replaced while a folder is read may be left out."""
    names = Storage.names
    async with batches(tmp_path, behaviour=holds) as running, client_of(running) as client:
        batch = await begin(client, jsonl(line("quick"), line("held")))
        await until_completed(client, batch.id, 1)
        (found,) = [each for each in running.gateway.rooms if isinstance(each, room.BatchesRoom)]
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "names", lambda *of: [each for each in names(*of) if each.endswith(".notes")])
            await found._look()
        await client.batches.cancel(batch.id)
        assert (await answers_of(client, await ended(client, batch.id, "cancelled"))).keys() == {"quick"}


async def test_a_list_goes_on_after_what_was_deleted_meanwhile(tmp_path: Path) -> None:
    async with batches(tmp_path) as running, client_of(running) as client:
        ids = sorted([(await client.files.create(file=("a", b"x"), purpose="batch")).id for _ in range(5)])
        await client.files.delete(ids[2])
        descending = await client.files.list(after=ids[2], order="desc")
        assert [each.id for each in descending.data] == [ids[1], ids[0]]
        ascending = await client.files.list(after=ids[2], order="asc")
        assert [each.id for each in ascending.data] == ids[3:]


@pytest.mark.slow
async def test_a_file_is_read_no_further_for_a_client_that_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, content = Counter[str](), Storage.content

    def counted(self: Storage, path: str) -> Iterator[bytes]:
        parts["opened"] += 1
        try:
            for part in content(self, path):
                parts["read"] += 1
                yield part
        finally:
            parts["closed"] += 1

    monkeypatch.setattr(Storage, "content", counted)
    async with batches(tmp_path) as running, client_of(running) as client:
        file = await client.files.create(file=("a", b"x" * (30 << 20)), purpose="batch")
        async with running.client.stream("GET", f"/v1/files/{file.id}/content") as answer:
            assert answer.status_code == 200
        await running.until(lambda: parts["closed"])
        assert parts["read"] < 30


@pytest.mark.slow
async def test_lines_keep_the_limits_of_their_key(tmp_path: Path) -> None:
    """Each line costs 10 tokens; the key may have 50 a minute, of which lines leave half."""
    keys = [*keys_of("a", tokens_per_minute=50), KeySettings(name="b", key="sk-b", batch_tokens_per_day=40)]
    async with batches(tmp_path, keys=keys) as running:
        async with client_of(running, "sk-a") as client, client_of(running, "sk-b") as daily:
            slow = await begin(client, jsonl(*[line(f"a{number}") for number in range(50)]))
            other = await begin(daily, jsonl(*[line(f"b{number}") for number in range(50)]))
            await running.until(lambda: seen_of(running).total() >= 7)
            await stays(lambda: seen_of(running).total() <= 9, 3.0)
            assert sum(name.startswith("b") for name in seen_of(running)) == 4
            assert (await client.chat.completions.create(model=MODEL, messages=[])).choices
            for each, batch in ((client, slow), (daily, other)):
                await each.batches.cancel(batch.id)
                await ended(each, batch.id, "cancelled")


async def test_a_key_may_be_kept_from_batches(tmp_path: Path) -> None:
    async with batches(tmp_path, keys=keys_of("a", batches=False)) as running, client_of(running, "sk-a") as client:
        with pytest.raises(openai.PermissionDeniedError, match="may not use files and batches"):
            await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert (await running.client.get("/v1/batches", headers={"x-api-key": "sk-a"})).status_code == 403


@pytest.mark.parametrize("sent", [b"-99", b'"-99"'])
async def test_no_line_comes_before_requests(tmp_path: Path, sent: bytes) -> None:
    body = b'{"model":"m","messages":[],"pri\\u006frity": %b,"seed":12345678901234567890123456}' % sent
    async with batches(tmp_path) as running, client_of(running) as client:
        await ended(client, (await begin(client, raw_line("a", body))).id)
        (seen,) = [each for up in running.upstreams.values() for each in up.seen]
        assert seen.body == body.replace(sent, b"0")


def test_a_file_in_the_place_of_a_folder_is_set_aside(tmp_path: Path) -> None:
    kinds: list[str] = []
    storage = Storage(tmp_path, on_aside=kinds.append)
    (tmp_path / "owner").mkdir()
    for folder in ("owner/files", "open"):
        (tmp_path / folder).write_text("stray")
        assert storage.names(folder) == []
    assert kinds == ["files", "open"]
