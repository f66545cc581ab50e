"""The log of a gateway process: as JSON, and the access log."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from gateway.config.settings import TelemetrySettings
from gateway.reload.differences import needs_restart
from gateway.rooms.reports.access_log import AccessLog
from gateway.rooms.reports.room import Outlet, ReportsRoom
from gateway.rooms.reports.trail import TraceParent, Trail, read_traceparent
from gateway.service.run import _show
from gateway.telemetry.log_format import JsonLogFormat, LogFormat
from gateway.telemetry.log_handler import MOST_WAITING_BYTES, LogHandler
from policies.policy import Decision
from tests.gateway.conftest import MODEL
from tests.gateway.reload.test_differences import pool as pool_with
from tests.support.command import Command, gateway_command, until
from tests.support.pool_file import write_pool
from tests.support.upstream import Wire, answer, upstreams_in_thread

TRACE = "0af7651916cd43dd8448eb211c80319c"
PROMPT = "zqxprompt"
PIPE_BYTES = 4096
END_S = 20.0


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """The ends of a small pipe, to read and to write."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with open(reading) as reader, open(writing, "w") as writer:
        yield reader, writer


async def failing_once(wire: Wire) -> None:
    """Fail every request at `a`."""
    if wire.upstream.name == "a":
        await wire.json({"error": {"message": PROMPT, "code": 503}}, 503)
    else:
        await wire.json(answer(wire.upstream.name))


def lines_of(command: Command) -> list[dict[str, Any]]:
    """Return the lines of the log, which are the objects; the command also prints a table and its address."""
    return [json.loads(line) for line in command.printed().splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_line_for_each_request_with_its_ids_and_none_of_its_text(tmp_path: Path) -> None:
    with upstreams_in_thread("ab", MODEL, failing_once) as upstreams:
        pool = write_pool(
            tmp_path / "pool.yaml",
            {each.name: each.url for each in upstreams},
            telemetry={"log_format": "json", "access_log": 1},
            keys=[{"name": "team", "key": "sk-zqxkey"}],
            state="none",
        )
        with gateway_command(pool, tmp_path, "--workers", "2") as command:
            until(lambda: command.get("/readyz").json().get("ready"))
            body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
            key = {"authorization": "Bearer sk-zqxkey"}
            trace = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            for number in range(4):
                headers = key | trace | {"x-request-id": f'r"{number}'}
                assert command.post("/v1/chat/completions?secret=zqx", body, headers=headers).status_code == 200
            assert command.post("/v1/chat/completions", body | {"model": "zqxno"}, headers=key).status_code == 404
            assert command.post("/v1/chat/completions", body).status_code == 401
            until(lambda: len([line for line in lines_of(command) if line["logger"] == "gateway.access"]) == 6)
            assert command.end() == 0
            lines, printed = lines_of(command), command.printed()
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {line["logger"] for line in lines} > {"gateway.access"}
    access = [line for line in lines if line["logger"] == "gateway.access"]
    served = {line["request_id"]: line for line in access if line["message"].endswith(" 200")}
    assert set(served) == {f'r"{number}' for number in range(4)}
    retried = next(line for line in served.values() if "retried_from" in line)
    expected = {"trace_id": TRACE, "model": MODEL, "backend": "b", "method": "baseline", "policy": "round_robin"}
    expected |= {"key": "team", "outcome": "ok", "retried_from": "a", "message": "POST /v1/chat/completions 200"}
    assert {name: retried.get(name) for name in expected} == expected
    assert retried["prompt_tokens"] == 7
    assert 0.0 < retried["e2e_s"] < 60.0
    assert {line.get("error") for line in access} == {None, "model_not_found", "missing_api_key"}
    assert "zqx" not in printed


def test_fields_stand_behind_the_message_of_a_text_line() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "done", "fields": {"id": "a\nb", "n": 1}})
    assert LogFormat("%(levelname)s: %(message)s").format(record) == 'INFO: done id="a\\nb" n=1'
    error = ValueError(PROMPT)
    record.exc_info = type(error), error, error.__traceback__
    document = json.loads(JsonLogFormat(worker=3).format(record))
    assert (document["worker"], document["id"], document["n"]) == (3, "a\nb", 1)
    assert "ValueError" in document["exception"]
    assert PROMPT not in document["exception"]


def test_an_address_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="such as http://collector:4318"):
        TelemetrySettings.model_validate({"otlp": {"endpoint": "collector:4317"}})
    with pytest.raises(ValueError, match="put it in `headers`"):
        TelemetrySettings.model_validate({"otlp": {"endpoint": "https://u:p@collector"}})


@pytest.mark.parametrize("text", ["\x1b]0;title\x07\r\x9b2J", "\u2028\x85\u202e", "\ud800"])
def test_what_others_say_ends_no_line_and_steers_no_terminal(text: str) -> None:
    record = logging.makeLogRecord({"msg": "said %s", "args": (f"{text}\n2026-01-01 CRITICAL forged",), "levelno": 20})
    record.fields = {"name": text}
    record.exc_info = (OSError, OSError(2, text), None)
    first, second, *rest = LogFormat("%(message)s").format(record).split("\n")
    assert second.startswith("    2026-01-01 CRITICAL forged name=")
    assert all(line.isprintable() for line in (first, second, *rest))


def test_a_request_that_cannot_be_reported_keeps_no_other_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    broken, good = (Trail(lambda _: None, each, "GET", "/", b"", None, None) for each in (b"broken", b"good"))
    broken.legs.append(None)  # type: ignore[arg-type]
    good.arrived_s, good.ended_s = 1.0, 2.0
    assert not AccessLog().write([broken, good])
    assert [
        getattr(each, "fields", {}).get("request_id") for each in caplog.records if each.name == "gateway.access"
    ] == ["good"]


def test_what_has_come_before_it_is_stopped_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    outlet = Outlet(AccessLog(), 10, 60.0)
    outlet.put(Trail(lambda _: None, b"last", "GET", "/", b"", None, None))
    outlet._stopping = True  # by now: the thread was about to look for more
    outlet._awake.set()
    outlet._run()
    assert caplog.messages == ["GET / 0"]


def test_what_waits_to_be_reported_holds_no_headers() -> None:
    put: list[Trail] = []
    line = TraceParent(1, 2, is_sampled=True).line
    trail = Trail(put.append, b"", "GET", "/", line, read_traceparent(line), TraceParent(1, 3, is_sampled=True))
    trail.on_send(Decision("a", "round_robin", ""), ())
    assert trail.lines.endswith(b"-01\r\n")
    trail.refuse("", 503, "", 0.0)
    assert [each.lines + each._received for each in put] == [b""]


def test_other_settings_need_a_restart_and_headers_are_not_shown() -> None:
    before, after = (
        pool_with(telemetry={"otlp": {"endpoint": "http://c:4318", "headers": {"x": value}}})
        for value in ("one", "two")
    )
    logging = pool_with(telemetry={"access_log": 1.0})
    assert needs_restart(before, after, [ReportsRoom]) == ["telemetry.otlp.headers.x: changed"]
    assert needs_restart(pool_with(), after, [ReportsRoom]) == ["telemetry.otlp: not set -> set"]
    assert needs_restart(pool_with(), logging, [ReportsRoom]) == ["telemetry.access_log: 0.0 -> 1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_standard_error_that_nobody_reads_stops_nothing(
    workers: str, tmp_path: Path, pipe: tuple[TextIO, TextIO]
) -> None:
    reader, writer = pipe
    with upstreams_in_thread("a", MODEL) as (upstream,):
        pool = write_pool(tmp_path / "pool.yaml", {"a": upstream.url}, telemetry={"access_log": 1}, state="none")
        with gateway_command(pool, tmp_path, "--workers", workers, stderr=writer.fileno()) as command:
            for number in range(40):
                headers = {"x-request-id": f"{number}-{'x' * 100}"}
                assert command.post("/v1/chat/completions", {"model": "no"}, headers=headers).status_code == 404
                assert command.post("/admin/reload", {}, headers=command.admin).status_code == 200
            assert command.get("/health").status_code == 200
            began_s = time.monotonic()
            assert command.end() == 0
            assert time.monotonic() - began_s < END_S
    writer.close()
    assert len(reader.read()) > PIPE_BYTES - 1000  # it was full


def test_lines_that_do_not_fit_are_counted_in_their_place(pipe: tuple[TextIO, TextIO]) -> None:
    reader, writer = pipe
    handler = LogHandler(writer)
    handler.setFormatter(LogFormat("%(message)s"))
    fitting = MOST_WAITING_BYTES // PIPE_BYTES  # the first one does not fit into the pipe
    for number in range(fitting + 3):
        handler.handle(logging.makeLogRecord({"msg": f"{number} {'x' * PIPE_BYTES}"}))
    logging.getLogger().addHandler(handler)
    assert AccessLog().write([]) == "standard error is not read"
    logging.getLogger().removeHandler(handler)
    read = [reader.readline() for _ in range(fitting + 1)]
    assert [int(line.split()[0]) for line in read] == [*range(fitting), 3]
    assert read[-1] == "3 lines of the log were lost here: standard error was not read\n"
    handler.handle(logging.makeLogRecord({"msg": "later"}))
    handler.close()
    writer.close()
    assert reader.read() == "later\n"


def test_lines_that_wait_are_written_at_the_end(pipe: tuple[TextIO, TextIO]) -> None:
    reader, writer = pipe
    handler = LogHandler(writer)
    handler.setFormatter(LogFormat("%(message)s"))
    for number in range(100):
        handler.handle(logging.makeLogRecord({"msg": f"{number} {'x' * 200}"}))
    read = list[str]()
    reading = threading.Thread(target=lambda: read.extend(reader))
    reading.start()
    handler.close()
    writer.close()
    reading.join()
    assert [line.split()[0] for line in read] == [str(number) for number in range(100)]


def test_a_standard_output_that_nobody_reads_is_left(
    pipe: tuple[TextIO, TextIO], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe[1].write("x" * PIPE_BYTES)
    pipe[1].flush()
    monkeypatch.setattr("sys.stdout", pipe[1])
    monkeypatch.setattr("gateway.service.run._PRINT_S", 0.0)
    _show(["Listening at last"])
    assert caplog.messages == ["standard output cannot be written: nobody reads it"]
