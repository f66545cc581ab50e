"""A simulated replica answers in vLLM's formats, whole and streamed, and stops when a client leaves."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from backends.calibration.calibration import Kind
from backends.engine_metrics import EngineMetrics, read_metrics
from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.driver import Play
from backends.simulator.server.protocol import ChatBody
from backends.simulator.server.rendering import RenderedReply
from tests.support.waiting import eventually_blocking

MODEL = "llama-3.1-8b"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
CODE = "\n".join(
    f"def step_{index}(value):\n    return value * {index} + step_{index + 1}(value)" for index in range(9)
)
REPEAT = [{"role": "user", "content": f"Repeat this code exactly:\n```python\n{CODE}\n```"}]
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Oslo, in celsius?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
CALLED = {"city": "Oslo", "unit": "celsius"}
LONG = [{"role": "user", "content": "word " * 5000}]


@pytest.fixture(scope="module")
def urls(simulator: Any) -> dict[str, str]:
    return simulator.urls


def post(url: str, **body: Any) -> Any:
    answer = httpx.post(url, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(url: str, **body: Any) -> Any:
    return post(url + CHAT, **({"messages": HELLO, "max_tokens": 20} | body))


def stream(url: str, **body: Any) -> list[Any]:
    """Return the events of a stream."""
    answer = httpx.post(url, json={"model": MODEL, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def engine(url: str) -> EngineMetrics:
    metrics = read_metrics(httpx.get(f"{url}/metrics").content)
    assert metrics is not None
    return metrics


def text_of(answer: Any) -> str:
    """Return the text, or the arguments of the tool call, of an answer or an event of any API."""
    if answer.get("type") == "message":
        (block,) = answer["content"]
        return str(block["text"]) if block["type"] == "text" else json.dumps(block["input"], separators=(",", ":"))
    if answer.get("object") == "response":
        (item,) = answer["output"]
        return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    if "type" in answer:
        delta = answer.get("delta", "")
        if isinstance(delta, str):
            return delta if answer["type"].endswith(".delta") else ""
        return str(delta.get("text", "")) + str(delta.get("partial_json", ""))
    said = ""
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or choice
        calls = message.get("tool_calls") or ()
        said += (message.get("content") or message.get("text") or "") + "".join(
            call["function"]["arguments"] for call in calls
        )
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 30}),
        (CHAT, {"messages": WEATHER, "tools": [{"type": "function", "function": FUNCTION}]}),
        (CHAT, {"messages": WEATHER, "response_format": BY_SCHEMA}),
        (COMPLETIONS, {"prompt": "import os\n", "max_tokens": 30}),
        (RESPONSES, {"input": "Hello there", "instructions": "Be kind", "max_output_tokens": 30}),
        (RESPONSES, {"input": WEATHER, "tools": [{"type": "function", **FUNCTION}]}),
        (MESSAGES, {"messages": HELLO, "system": "Be kind", "max_tokens": 30}),
        (MESSAGES, {"messages": WEATHER, "max_tokens": 99, "tools": [TOOL]}),
    ],
)
def test_a_stream_says_what_a_whole_answer_says(urls: dict[str, str], path: str, body: dict[str, Any]) -> None:
    body = {"temperature": 0, **body}
    whole = text_of(post(urls["lookup"] + path, **body))
    assert "".join(map(text_of, stream(urls["lookup"] + path, **body))) == whole
    assert whole
    if WEATHER in body.values():
        assert json.loads(whole) == CALLED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"function": {"name": "get_weather"}}, "stop")],
)
def test_tools_are_called(urls: dict[str, str], choice: Any, reason: str) -> None:
    asked = {"messages": WEATHER, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 99}
    (given,) = chat(urls["plain"], tool_choice=choice, **asked)["choices"]
    (call,) = given["message"]["tool_calls"]
    assert (given["finish_reason"], call["function"]["name"]) == (reason, "get_weather")
    answered = [*WEATHER, given["message"], {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}]
    (after,) = chat(urls["plain"], **asked | {"messages": answered})["choices"]
    assert after["message"]["content"]
    assert "tool_calls" not in chat(urls["plain"], tool_choice="none", **asked)["choices"][0]["message"]


def test_replicas_of_a_model_answer_greedy_and_seeded_requests_alike(urls: dict[str, str]) -> None:
    for asked in ({"temperature": 0}, {"temperature": 1, "seed": 1}):
        assert len({text_of(chat(urls[name], **asked)) for name in ("plain", "lookup", "eagle3")}) == 1
    assert text_of(chat(urls["plain"], seed=1)) != text_of(chat(urls["plain"], seed=2))


def test_a_stream_has_a_chunk_for_each_step(urls: dict[str, str]) -> None:
    asked = {"messages": REPEAT, "temperature": 0, "max_tokens": 60, "return_token_ids": True}
    first, *steps, last = stream(urls["lookup"] + CHAT, stream_options={"include_usage": True}, **asked)
    tokens = [len(step["choices"][0]["token_ids"]) for step in steps]
    assert sum(tokens) == last["usage"]["completion_tokens"] == 60
    assert last["usage"]["prompt_tokens"] == len(first["prompt_token_ids"])
    assert last["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 60 - len(tokens)
    assert last["choices"] == []
    plain = stream(urls["plain"] + CHAT, **asked)[1:]
    assert [len(step["choices"][0]["token_ids"]) for step in plain] == [1] * 60
    assert "system_fingerprint" in plain[-1], "the last chunk has it where no usage follows"
    assert [list(step) for step in plain[:-1]] == [["id", "object", "created", "model", "choices"]] * 59


def test_the_metrics_of_a_request_are_consistent(urls: dict[str, str]) -> None:
    body = chat(urls["lookup"], messages=REPEAT, temperature=0, max_tokens=150)
    metrics, tokens = body["metrics"], body["usage"]["completion_tokens"]
    speculation = metrics["speculative_decoding"]
    histogram, accepted = speculation["acceptance_histogram"], speculation["num_accepted_draft_tokens"]
    assert (len(histogram), sum(histogram)) == (6, speculation["num_spec_steps"])
    assert sum(length * steps for length, steps in enumerate(histogram)) == accepted
    assert speculation["draft_acceptance_rate"] == pytest.approx(accepted / speculation["num_draft_tokens"])
    assert speculation["mean_acceptance_length"] == pytest.approx(1 + accepted / sum(histogram))
    assert speculation["mean_acceptance_length"] > 3, "a copy is drafted well"
    whole_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert metrics["tokens_per_second"] == pytest.approx(tokens / whole_ms * 1e3)
    assert "speculative_decoding" not in chat(urls["plain"])["metrics"]


def test_the_times_of_a_request_begin_when_it_is_scheduled() -> None:
    answer = ComposedAnswer([1], [5] * 5, "abcde", [1, 2, 3, 4, 5], Kind.CHAT, "length")
    reply = RenderedReply(ChatBody(messages=HELLO), [answer], "id", 0, MODEL, "vllm", 0)
    play = Play(0, answer, print, arrived_s=1.0, scheduled_s=3.0, first_s=3.5, last_s=5.5, sent=5)
    times = {"time_to_first_token_ms": 500, "generation_time_ms": 2000, "queue_time_ms": 2000, "mean_itl_ms": 500}
    assert reply.end_of([play])["metrics"] == {**times, "tokens_per_second": 2}
    play.sent = 1
    assert reply.end_of([play])["metrics"]["mean_itl_ms"] is None


def test_the_counters_of_the_engine_agree_with_its_answers(urls: dict[str, str]) -> None:
    url = urls["lookup"]
    before = engine(url)
    bodies = [chat(url, messages=REPEAT, temperature=0, max_tokens=tokens) for tokens in (1, 30, 60)]
    after = engine(url)
    usages, drafts = [body["usage"] for body in bodies], [body["metrics"]["speculative_decoding"] for body in bodies]
    assert after.prompt_tokens - before.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert after.generation_tokens - before.generation_tokens == 91
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert after.prefix_hits - before.prefix_hits == cached > 0
    assert after.drafts - before.drafts == sum(draft["num_spec_steps"] for draft in drafts)
    accepted = after.accepted_tokens - before.accepted_tokens
    assert accepted == sum(draft["num_accepted_draft_tokens"] for draft in drafts) > 0
    assert sum(after.accepted_per_position) == after.accepted_tokens
    assert (after.steps or 0) - (before.steps or 0) == 91 - accepted
    assert (after.running, after.ignored, after.speculates) == (0, (), True)
    assert after.kv_tokens > 0
    assert after.prefix_caching == 1
    assert engine(urls["plain"]).speculates is False


@pytest.mark.parametrize(
    ("path", "replica", "depth", "most"),
    [
        *((CHAT, "asked", depth, depth) for depth in (0, 1, 3)),
        *((CHAT, "asked", depth, 3) for depth in (None, 9, -1, 1.5, "2")),
        (CHAT, "eagle3", 0, 3),
        (RESPONSES, "asked", 1, 1),
    ],
)
def test_a_request_is_drafted_as_deep_as_it_asks(
    urls: dict[str, str], path: str, replica: str, depth: object, most: int
) -> None:
    before = engine(urls[replica])
    more = {} if depth is None else {"vllm_xargs": {"draft_tokens": depth}}
    said = {"messages": REPEAT, "max_tokens": 60} if path == CHAT else {"input": REPEAT, "max_output_tokens": 60}
    asked = {**said, "temperature": 0, "ignore_eos": True}
    assert text_of(post(urls[replica] + path, **asked, **more)) == text_of(post(urls["plain"] + path, **asked))
    after = engine(urls[replica])
    drafts = after.drafts - before.drafts
    assert most * drafts * 0.9 <= after.draft_tokens - before.draft_tokens <= most * drafts
    assert (drafts > 0) == (most > 0)


def test_several_choices_and_prompts(urls: dict[str, str]) -> None:
    body = chat(urls["lookup"], n=3, seed=5)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert body["usage"]["completion_tokens"] == 60
    streamed = ["", "", ""]
    for event in stream(urls["lookup"] + CHAT, messages=HELLO, n=3, seed=5, max_tokens=20):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert streamed == texts
    ids = post(urls["plain"] + "/tokenize", prompt="class Thing:")["tokens"]
    answers = [
        post(urls["plain"] + COMPLETIONS, prompt=prompt, max_tokens=8, temperature=0)["choices"]
        for prompt in ("class Thing:", ["class Thing:", "import os"], ids, [ids, [5, 6, 7]])
    ]
    assert [len(choices) for choices in answers] == [1, 2, 1, 2]
    assert len({choices[0]["text"] for choices in answers}) == 1, "text and its ids are the same prompt"


def test_stop_strings(urls: dict[str, str]) -> None:
    whole = text_of(chat(urls["plain"], temperature=0, max_tokens=60))
    stop = whole[40:43]
    (cut,) = chat(urls["plain"], temperature=0, max_tokens=60, stop=[stop, "never said"])["choices"]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    message = post(urls["plain"] + MESSAGES, messages=HELLO, temperature=0, max_tokens=60, stop_sequences=[stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.slow
def test_an_answer_that_is_not_to_end_has_the_length_asked_for(urls: dict[str, str]) -> None:
    assert chat(urls["plain"], ignore_eos=True, max_tokens=1500)["usage"]["completion_tokens"] == 1500


def test_paths_beside_those_for_text(urls: dict[str, str]) -> None:
    url = urls["plain"]
    assert httpx.get(f"{url}/health").status_code == 200
    assert "simulated" in httpx.get(f"{url}/version").json()["version"]
    (entry,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (MODEL, 2048)
    tokens = post(f"{url}/tokenize", messages=HELLO)["tokens"]
    assert "Hello, who are you?" in post(f"{url}/detokenize", tokens=tokens)["prompt"]
    assert post(f"{url}/v1/messages/count_tokens", messages=HELLO)["input_tokens"] == len(tokens)
    assert httpx.get(url + CHAT).status_code == 405
    assert httpx.post(f"{url}/v1/embeddings", json={"input": "hi"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        (CHAT, {"model": "nope", "messages": HELLO}, 404, "Valid aliases: llama-3.1-8b"),
        (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        (CHAT, {"messages": HELLO, "max_tokens": 5000}, 400, "max_tokens=5000 cannot be greater"),
        (CHAT, {"messages": LONG, "stream": True}, 400, "maximum context length is 2048"),
        (CHAT, {"messages": HELLO, "min_p": 0.1}, 400, "not yet supported with speculative decoding"),
        (CHAT, {"messages": HELLO, "response_format": BY_SCHEMA | {"json_schema": {"schema": 5}}}, 400, "Invalid JSON"),
        (CHAT, {"messages": HELLO, "tools": [{"function": {}}], "tool_choice": "required"}, 400, "Invalid JSON schema"),
        (CHAT, {"messages": HELLO, "n": 2, "temperature": 0}, 400, "n must be 1 when using greedy sampling, got 2."),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "Stream options can only"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, 400, "stop cannot contain an empty string"),
        (CHAT, [], 400, "Input should be a valid dictionary"),
        (CHAT, b'{"messages":', 400, "Expecting value"),
        (CHAT, b'"\xff"', 400, "decode"),
        (COMPLETIONS, {"prompt": [999999]}, 400, "999999 is out of vocabulary"),
        (RESPONSES, {"input": "And?", "previous_response_id": "resp_1"}, 404, "'resp_1' not found"),
        (MESSAGES, {"model": "nope", "max_tokens": 2, "messages": HELLO}, 404, "does not exist"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1 is out of vocabulary"),
    ],
)
def test_refusals(urls: dict[str, str], path: str, content: Any, status: int, message: str) -> None:
    content = content if isinstance(content, bytes) else json.dumps(content)
    answer = httpx.post(urls["lookup"] + path, content=content)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status


def test_what_is_left_to_the_engine_is_no_error(urls: dict[str, str]) -> None:
    asked = {"n": None, "stop": None, "stream_options": None, "max_tokens": None, "temperature": None}
    assert len(chat(urls["plain"], **asked)["choices"]) == 1


def test_paths_under_v1_need_the_api_key(urls: dict[str, str]) -> None:
    url = urls["locked"]
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
        answer = httpx.get(f"{url}/v1/models", headers=headers)
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    models = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer s3cret"}).json()
    assert [entry["id"] for entry in models["data"]] == ["alias", "other"]
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False])
def test_requests_of_a_client_that_disconnects_are_aborted(urls: dict[str, str], streaming: bool) -> None:
    url = urls["slow"]
    body = {"messages": HELLO, "max_tokens": 2000, "ignore_eos": True, "stream": streaming, "n": 2}
    try:
        with httpx.stream("POST", url + CHAT, json=body, timeout=1.0):
            eventually_blocking(lambda: engine(url).running == 2)
    except httpx.ReadTimeout:
        assert not streaming
    eventually_blocking(lambda: engine(url).running == 0)
    assert 'finished_reason="abort"' in httpx.get(f"{url}/metrics").text
