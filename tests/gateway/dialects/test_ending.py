"""Which answers say of themselves that they are whole, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.ending import InvalidAnswerError, check_whole
from gateway.dialects.sse import EventStream
from policies.features.request import Endpoint

CHAT, COMPLETIONS, MESSAGES = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES
RESPONSES, EMBEDDINGS = Endpoint.RESPONSES, Endpoint.EMBEDDINGS
DONE = b"data: [DONE]\n\n"


def chat(*reasons: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {}, "finish_reason": reason} for reason in reasons], "error": None}


def response(status: str, **more: Any) -> dict[str, Any]:
    return {"object": "response", "status": status, "output": [], "error": None, **more}


WHOLE = [
    *((CHAT, chat(reason)) for reason in ("stop", "length", "tool_calls", "content_filter", "repetition", "new", 7)),
    (CHAT, chat("stop", "length")),
    (CHAT, {"choices": [{"message": {}}]}),  # an engine that names no reasons
    (COMPLETIONS, {"choices": [{"text": "abort", "finish_reason": "stop"}]}),
    (MESSAGES, {"content": [], "stop_reason": "end_turn"}),
    (RESPONSES, response("completed")),
    (RESPONSES, response("incomplete", incomplete_details={"reason": "max_output_tokens"})),
    (RESPONSES, response("queued")),
    (EMBEDDINGS, {"data": [{}, {}]}),
    (CHAT, {"error": {"message": "your fault", "code": 400}}),
    (CHAT, {"object": "error", "message": "unknown", "type": "NotFoundError", "code": 404}),
]
HALF = [
    *((CHAT, chat(reason)) for reason in ("abort", "ABORTED", "error", "cancelled", "failed", None)),
    (CHAT, chat("stop", "abort")),
    (COMPLETIONS, {"choices": [{"text": "", "finish_reason": "abort"}]}),
    (MESSAGES, {"content": []}),  # as vLLM says that it has aborted: the reason is left out
    (MESSAGES, {"content": [], "stop_reason": None}),
    (RESPONSES, response("failed", error={"code": "server_error", "message": "boom"})),
    (RESPONSES, response("failed")),
    (RESPONSES, response("cancelled")),
    (RESPONSES, response("incomplete", incomplete_details={"reason": "abort"})),
    (EMBEDDINGS, {"data": [{}]}),
]
NOTHING: list[tuple[Endpoint, Any]] = [
    *((CHAT, each) for each in ("text", None, 7)),
    *((CHAT, each) for each in (list[Any](), dict[str, Any]())),
    *((CHAT, {"choices": choices}) for choices in (list[Any](), [None], dict[str, Any]())),
    (CHAT, {"choices": [{"index": 0, "finish_reason": "stop"}]}),
    *((endpoint, {"id": "x"}) for endpoint in (MESSAGES, RESPONSES, EMBEDDINGS)),
    *((CHAT, {"error": error}) for error in ("out of memory", {"message": "x"}, {"code": 503}, {"code": "500"})),
    (CHAT, {"error": {"type": "overloaded_error"}}),
]


@pytest.mark.parametrize(("endpoint", "document"), WHOLE)
def test_an_answer_is_whole_whatever_its_reason_to_end_unless_that_is_the_engines(
    endpoint: Endpoint, document: object
) -> None:
    assert check_whole(endpoint, document, items=2) in {0, 400, 404}


@pytest.mark.parametrize(
    ("endpoint", "document", "kind"), [(*each, "broken") for each in HALF] + [(*each, "garbage") for each in NOTHING]
)
def test_half_an_answer_and_another_one_are_none(endpoint: Endpoint, document: object, kind: str) -> None:
    with pytest.raises(InvalidAnswerError) as error:
        check_whole(endpoint, document, items=2)
    assert error.value.kind == ("garbage" if isinstance(document, dict) and document.get("error") else kind)


def event(document: object, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(reason: object = None, index: int = 0, **more: Any) -> bytes:
    return event({"choices": [{"index": index, "delta": {}, "finish_reason": reason, **more}]})


def compact(data: bytes) -> bytes:
    return data.replace(b'": ', b'":')


def message(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def of_response(kind: str, status: str, **fields: Any) -> bytes:
    return message(f"response.{kind}", response=response(status, **fields))


USAGE = event({"choices": [], "usage": {"completion_tokens": 2}})
STOPPED = message("message_delta", delta={"stop_reason": "end_turn"})
MESSAGE_STOP = message("message_stop")
WHOLE_STREAMS = [
    (CHAT, [chunk(), chunk("stop"), USAGE, DONE]),
    (CHAT, [chunk(), chunk("repetition"), DONE.replace(b": ", b":").replace(b"\n", b"\r\n")]),
    (CHAT, [chunk(), chunk("length"), *[USAGE] * 9, DONE]),
    (CHAT, [chunk(index=0), chunk(index=1), chunk("stop", 1), chunk("stop", 0), DONE]),
    (CHAT, [chunk(), chunk("stop", text='"finish_reason":"abort"'), DONE]),
    (CHAT, [chunk(padding="x" * (1 << 20)), chunk("stop"), DONE]),
    (CHAT, [chunk(), chunk("stop", padding="x" * (1 << 21)), DONE]),
    (MESSAGES, [message("message_start", message={"stop_reason": None}), STOPPED, MESSAGE_STOP]),
    (RESPONSES, [of_response("created", "in_progress"), of_response("completed", "completed")]),
    (RESPONSES, [of_response("incomplete", "incomplete", incomplete_details={"reason": "max_output_tokens"})]),
    (EMBEDDINGS, [event({"data": []}), DONE]),
]
HALF_STREAMS = [
    (CHAT, [chunk(), chunk("abort"), DONE]),
    (CHAT, [chunk(), chunk("error"), DONE]),
    (CHAT, [chunk(), DONE]),
    (CHAT, [DONE]),
    (CHAT, [chunk(), USAGE, DONE]),
    (CHAT, [chunk(index=0), chunk(index=1), chunk("stop", 0), DONE]),
    (CHAT, [chunk(index=0), chunk(index=1), chunk("stop", 0), chunk("abort", 1), DONE]),
    (MESSAGES, [message("message_delta", delta={"stop_reason": None}), MESSAGE_STOP]),
    (MESSAGES, [message("message_delta", delta={"stop_reason": "abort"}), MESSAGE_STOP]),
    (MESSAGES, [MESSAGE_STOP]),
    (RESPONSES, [of_response("completed", "cancelled")]),
    (RESPONSES, [of_response("incomplete", "incomplete", incomplete_details={"reason": "abort"})]),
]
ERRORS = [
    (CHAT, [chunk(), event({"error": {"code": 500}}), DONE], 500),
    (CHAT, [chunk(), event({"error": "out of memory"}), DONE], 500),
    (CHAT, [event({"error": {"code": 503}}), DONE], 503),
    (MESSAGES, [message("error", error={"type": "overloaded_error", "message": "x"})], 503),
    (RESPONSES, [message("error", code="server_error", message="x")], 500),
    (RESPONSES, [of_response("failed", "failed", error={"code": "server_error"})], 500),
    (RESPONSES, [message("response.failed")], 500),
]


@pytest.fixture(params=["spaced", "compact", "compact, in one read"])
def reads(request: pytest.FixtureRequest) -> Any:
    def made(events: list[bytes]) -> list[bytes]:
        events = events if request.param == "spaced" else [*map(compact, events)]
        return [b"".join(events)] if "one" in request.param else events

    return made


def fed(endpoint: Endpoint, reads: list[bytes]) -> tuple[EventStream, bytes]:
    """Feed a stream until something of it is withheld."""
    has_choices, passed = any(b'"index":1' in read.replace(b" ", b"") for read in reads), b""
    stream = EventStream(endpoint, has_choices=has_choices)
    for read in reads:
        passed += stream.feed(read)
        if stream.withheld:
            break
    return stream, passed


@pytest.mark.parametrize(("endpoint", "events"), WHOLE_STREAMS)
def test_a_whole_stream_passes(endpoint: Endpoint, events: list[bytes], reads: Any) -> None:
    stream, passed = fed(endpoint, reads(events))
    assert passed == b"".join(reads(events))
    assert stream.ending.is_complete
    assert (stream.withheld, stream.ending.flaw, stream.ending.error_status) == (b"", "", 0)


@pytest.mark.parametrize(("endpoint", "events"), HALF_STREAMS)
def test_what_would_make_half_a_stream_look_whole_is_withheld(
    endpoint: Endpoint, events: list[bytes], reads: Any
) -> None:
    stream, passed = fed(endpoint, reads(events))
    assert stream.ending.flaw
    assert not stream.ending.is_complete
    assert stream.withheld
    for mark in (b"abort", b"error", b"[DONE]", b"message_stop", b"cancelled"):
        assert mark not in passed


@pytest.mark.parametrize(("endpoint", "events", "status"), ERRORS)
def test_an_error_of_the_engine_is_withheld_until_it_is_known_that_no_other_goes_on(
    endpoint: Endpoint, events: list[bytes], status: int, reads: Any
) -> None:
    stream, passed = fed(endpoint, reads(events))
    assert (stream.ending.error_status, stream.ending.is_complete) == (status, False)
    assert passed + stream.pass_withheld() in b"".join(reads(events))
    assert stream.ending.is_complete


def test_an_error_of_the_client_ends_a_stream_as_it_is() -> None:
    for error in (event({"error": {"code": 400}}), event({"error": {"type": "invalid_request_error"}})):
        stream, passed = fed(CHAT, [chunk(), error, DONE])
        assert passed == chunk() + error + DONE
        assert (stream.ending.is_complete, stream.ending.error_status) == (True, 400)


@pytest.mark.parametrize("ending", [[chunk("stop"), DONE], [chunk("abort"), DONE]])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_end_does_not_depend_on_how_the_stream_is_read(ending: list[bytes], size: int) -> None:
    whole = b"".join([chunk(), chunk(), *ending])
    _, expected = fed(CHAT, [whole])
    assert fed(CHAT, [whole[at : at + size] for at in range(0, len(whole), size)])[1] == expected
