"""Errors have vLLM's messages, formats and statuses."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.support.waiting import eventually_blocking

MODEL = "llama-3.1-8b"
HELLO = [{"role": "user", "content": "hi"}]
LONG = "def foo(x):\n" * 1000
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def urls(simulator: Any) -> dict[str, str]:
    return simulator.urls  # type: ignore[no-any-return]


def error(message: str, kind: str, param: str | None, code: int = 400) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None) -> dict[str, Any]:
    return error(message, "BadRequestError", param)


TOO_LONG = invalid(
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=2049)",
    "input_tokens",
)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            CHAT,
            {"model": "nope", "messages": HELLO},
            error(f"The model `nope` does not exist. Valid aliases: {MODEL}.", "NotFoundError", "model", 404),
        ),
        (
            CHAT,
            {"model": MODEL},
            error(
                "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
                "'input': '<dict of 1 items>'}",
                "Bad Request",
                "body.messages",
            ),
        ),
        (
            CHAT,
            {"messages": HELLO, "temperature": "hot"},
            error(
                "1 validation error:\n  {'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Input should be "
                "a valid number, unable to parse string as a number', 'input': 'hot'}",
                "Bad Request",
                "body.temperature",
            ),
        ),
        (
            CHAT,
            {"messages": []},
            invalid("Cannot apply chat template to an empty conversation. Provide at least one message."),
        ),
        (
            CHAT,
            {"messages": HELLO, "temperature": -1},
            invalid("temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)", "temperature"),
        ),
        (
            CHAT,
            {"messages": HELLO, "max_tokens": 5000},
            invalid(
                "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens. "
                "(parameter=max_tokens, value=5000)",
                "max_tokens",
            ),
        ),
        (
            CHAT,
            {"messages": HELLO, "max_tokens": 0},
            invalid("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
        ),
        (
            CHAT,
            {"messages": HELLO, "stream_options": {"include_usage": True}},
            invalid(
                "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "stream_options"
            ),
        ),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, TOO_LONG),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "stream": True}, TOO_LONG),
        (CHAT, {"messages": [{"role": "user", "content": LONG * 4}], "stream": True}, TOO_LONG),
        ("/v1/completions", {"prompt": LONG}, TOO_LONG),
        ("/v1/completions", {"prompt": [999999]}, invalid("Token id 999999 is out of vocabulary")),
        (
            CHAT,
            {"messages": HELLO, "n": 2, "temperature": 0},
            invalid("n must be 1 when using greedy sampling, got 2."),
        ),
        ("/v1/embeddings", {"input": "hi"}, {"detail": "Not Found"}),
        ("/nothing", {}, {"detail": "Not Found"}),
        (
            "/v1/messages",
            {"model": "nope", "max_tokens": 2, "messages": HELLO},
            {
                "type": "error",
                "error": {
                    "type": "NotFoundError",
                    "message": f"The model `nope` does not exist. Valid aliases: {MODEL}.",
                },
            },
        ),
        (
            "/v1/responses",
            {"model": MODEL, "input": LONG},
            TOO_LONG,
        ),
    ],
)
def test_refusals(urls: dict[str, str], path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    answer = httpx.post(urls["plain"] + path, json=body)
    assert answer.json() == expected
    status = 404 if "detail" in expected or "NotFound" in answer.text else 400
    assert answer.status_code == status
    assert answer.headers["x-simulated"] == "true"


@pytest.mark.parametrize(
    ("content", "content_type", "message", "param"),
    [
        (
            b'{"model":',
            "application/json",
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.9', 'msg': 'JSON decode error', "
            "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
            "body.9",
        ),
        (
            b'{"messages":[]}',
            "text/plain",
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            None,
        ),
        (
            b"",
            "application/json",
            "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': None}",
            "body",
        ),
        (b'"\xff"', "application/json", "There was an error parsing the body", None),
    ],
)
def test_invalid_json_is_refused(
    urls: dict[str, str], content: bytes, content_type: str, message: str, param: str | None
) -> None:
    answer = httpx.post(urls["plain"] + CHAT, content=content, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()) == (400, error(message, "Bad Request", param))


@pytest.mark.parametrize(
    "body", [[], 5, None, "text", {"messages": 5}, {"messages": ["x"]}, {"messages": HELLO, "n": 0}]
)
def test_unexpected_json_is_answered_with_400(urls: dict[str, str], body: Any) -> None:
    answer = httpx.post(urls["plain"] + CHAT, json=body)
    assert answer.status_code == 400
    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": []}, {"enum": 5}, {"minItems": "x", "type": "array"}]
)
def test_an_invalid_schema_is_refused(urls: dict[str, str], schema: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = httpx.post(urls["plain"] + CHAT, json={"messages": HELLO, "response_format": wanted})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"messages": HELLO, "max_tokens": 2}, "chat.completion"), ({"prompt": "x", "max_tokens": 2}, "text_completion")],
)
def test_an_invocation_is_what_its_body_says(urls: dict[str, str], body: dict[str, Any], kind: str) -> None:
    answer = httpx.post(f"{urls['plain']}/invocations", json=body)
    assert (answer.status_code, answer.json()["object"]) == (200, kind)


@pytest.mark.parametrize("body", [{}, {"input": "x"}, [], 5])
def test_an_invocation_that_fits_nothing_is_refused(urls: dict[str, str], body: Any) -> None:
    answer = httpx.post(f"{urls['plain']}/invocations", json=body)
    assert answer.json() == invalid(
        "Cannot find suitable handler for request. Expected one of: ['ChatCompletionRequest', 'CompletionRequest']"
    )
    assert answer.status_code == 400


def test_unknown_fields_are_ignored(urls: dict[str, str]) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "frobnicate": 1, "chat_template_kwargs": {"x": 1}}
    assert httpx.post(urls["plain"] + CHAT, json=body).status_code == 200


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"logit_bias": {"5": 1.0}}])
def test_parameters_unsupported_with_speculation_are_refused(urls: dict[str, str], asked: dict[str, Any]) -> None:
    for streaming in (False, True):
        body = {"messages": HELLO, "max_tokens": 2, "stream": streaming, **asked}
        answer = httpx.post(urls["lookup"] + CHAT, json=body)
        assert answer.status_code == 400
        assert "not yet supported with speculative decoding" in answer.json()["error"]["message"]
        assert httpx.post(urls["plain"] + CHAT, json=body).status_code == 200


def test_a_wrong_method_is_refused(urls: dict[str, str]) -> None:
    answer = httpx.get(urls["plain"] + CHAT)
    assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})


def test_paths_under_v1_need_the_api_key(urls: dict[str, str]) -> None:
    url = urls["locked"]
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
        answer = httpx.get(f"{url}/v1/models", headers=headers)
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200


def counter(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def wait_for(url: str, name: str, value: float) -> None:
    eventually_blocking(lambda: counter(url, name) == value, what=f"{name} is {value}")


def test_a_full_queue_refuses_requests(urls: dict[str, str]) -> None:
    url = urls["full"]
    waiting, running = "vllm:num_requests_waiting{", "vllm:num_requests_running{"
    body = {"messages": HELLO, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    started = threading.Barrier(2, timeout=10)
    leave = threading.Event()

    def occupy() -> None:
        with httpx.stream("POST", url + CHAT, json=body):
            started.wait()
            leave.wait(30)

    threads = []
    for name in (running, waiting):  # one runs, one waits
        threads.append(threading.Thread(target=occupy))
        threads[-1].start()
        started.wait()
        wait_for(url, name, 1)
    try:
        message = (
            "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance."
        )
        complete = httpx.post(url + CHAT, json={"messages": HELLO})
        assert complete.status_code == 503
        assert complete.json() == error(message, "Service Unavailable", None, 503)
        streamed = httpx.post(url + CHAT, json={"messages": HELLO, "stream": True})
        assert streamed.status_code == 200
        assert streamed.text == (
            f'data: {{"error": {{"message": "{message}", "type": "Service Unavailable", "param": null, '
            '"code": 503}}\n\ndata: [DONE]\n\n'
        )
        assert (
            counter(url, 'vllm:admission_rejections_total{model_name="llama-3.1-8b",reason="max_num_queued_reqs"') == 2
        )
    finally:
        leave.set()
        for thread in threads:
            thread.join(10)
    wait_for(url, running, 0)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_requests_of_a_client_that_disconnects_are_aborted(urls: dict[str, str], streaming: bool, count: int) -> None:
    url = urls["slow"]
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    before = counter(url, aborted)
    body = {"messages": HELLO, "max_tokens": 2000, "ignore_eos": True, "stream": streaming, "n": count}
    client = httpx.Client(timeout=0.5)
    try:
        with client.stream("POST", url + CHAT, json=body):
            wait_for(url, "vllm:num_requests_running{", count)
    except httpx.ReadTimeout:
        assert not streaming
    client.close()
    wait_for(url, "vllm:num_requests_running{", 0)
    assert counter(url, aborted) - before == count
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
