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
    assert given["message"]["content"] == (None if choice == "auto" else "")
    answered = [*WEATHER, given["message"], {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}]
    (after,) = chat(urls["plain"], **asked | {"messages": answered})["choices"]
    assert after["message"]["content"]
    for none in ("none", None):
        assert "tool_calls" not in chat(urls["plain"], tool_choice=none, **asked)["choices"][0]["message"]


def test_replicas_of_a_model_answer_greedy_and_seeded_requests_alike(urls: dict[str, str]) -> None:
    for asked in ({"temperature": 0}, {"temperature": 1, "seed": 1}):
        assert len({text_of(chat(urls[name], **asked)) for name in ("plain", "lookup", "eagle3")}) == 1
    assert text_of(chat(urls["plain"], seed=1)) != text_of(chat(urls["plain"], seed=2))
    free = {"seed": -1, "temperature": 2, "max_tokens": 100}  # so that the same text does not come twice by chance
    assert text_of(chat(urls["plain"], **free)) != text_of(chat(urls["plain"], **free))


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
    assert chat(urls["plain"])["metrics"]["speculative_decoding"] is None


def test_the_times_of_a_request_begin_when_it_is_scheduled() -> None:
    answer = ComposedAnswer([1], [5] * 5, "abcde", [1, 2, 3, 4, 5], Kind.CHAT, "length")
    reply = RenderedReply(ChatBody(messages=HELLO), [answer], "id", 0, MODEL, "vllm", 0)
    play = Play(0, answer, print, arrived_s=1.0, scheduled_s=3.0, first_s=3.5, last_s=5.5, sent=5)
    times = {"time_to_first_token_ms": 500, "generation_time_ms": 2000, "queue_time_ms": 2000, "mean_itl_ms": 500}
    assert reply.end_of([play])["metrics"] == {**times, "tokens_per_second": 2, "speculative_decoding": None}
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


def test_histograms_have_the_buckets_of_vllm(urls: dict[str, str]) -> None:
    page = httpx.get(f"{urls['plain']}/metrics").text
    for name, bound in (
        ("time_to_first_token", "0.02"),
        ("inter_token_latency", "0.15"),
        ("e2e_request_latency", "1.5"),
    ):
        assert f'vllm:{name}_seconds_bucket{{engine="0",le="{bound}",model_name="{MODEL}"}}' in page


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
    late = text_of(chat(urls["plain"], temperature=0, max_tokens=60, stop=stop, min_tokens=50))
    assert late.startswith(whole[: whole.index(stop) + 3])
    message = post(urls["plain"] + MESSAGES, messages=HELLO, temperature=0, max_tokens=60, stop_sequences=[stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_a_stream_holds_back_what_may_be_a_stop_string(urls: dict[str, str]) -> None:
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 20}
    plain, held = (
        [text_of(event) for event in stream(urls["plain"] + CHAT, **asked, **more)] for more in ({}, {"stop": "~" * 9})
    )
    assert "".join(plain) == "".join(held)
    assert len("".join(held[:-1])) == len("".join(plain[:-1])) - 8


@pytest.mark.slow
def test_an_answer_that_is_not_to_end_has_the_length_asked_for(urls: dict[str, str]) -> None:
    assert chat(urls["plain"], ignore_eos=True, max_tokens=1500)["usage"]["completion_tokens"] == 1500
    assert chat(urls["plain"], min_tokens=1500, max_tokens=None)["usage"]["completion_tokens"] >= 1500


def test_paths_beside_those_for_text(urls: dict[str, str]) -> None:
    url = urls["plain"]
    assert httpx.get(f"{url}/health").status_code == 200
    assert "simulated" in httpx.get(f"{url}/version").json()["version"]
    (entry,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (MODEL, 2048)
    tokens = post(f"{url}/tokenize", messages=HELLO)["tokens"]
    assert "Hello, who are you?" in post(f"{url}/detokenize", tokens=tokens)["prompt"]
    assert post(f"{url}/v1/messages/count_tokens", messages=HELLO)["input_tokens"] == len(tokens)
    wrong, unknown = httpx.get(url + CHAT), httpx.post(f"{url}/v1/embeddings", json={"input": "hi"})
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})


def test_an_answer_has_the_id_of_its_request(urls: dict[str, str]) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "max_output_tokens": 2, "input": "a", "prompt": "a"}
    ids = []
    for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES):
        answer = httpx.post(urls["plain"] + path, json=body, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        ids.append(answer.json()["id"])
    assert ids[:3] == ["chatcmpl-mine", "cmpl-mine", "chatcmpl-mine"]
    assert ids[3].startswith("resp_")
    assert "mine" not in ids[3]
    assert len(httpx.get(f"{urls['plain']}/health").headers["x-request-id"]) == 32


def test_an_answer_has_the_first_name_of_its_model(urls: dict[str, str]) -> None:
    headers = {"authorization": "Bearer s3cret"}
    body = {"model": "other", "messages": HELLO, "max_tokens": 2}
    assert httpx.post(urls["locked"] + CHAT, json=body, headers=headers).json()["model"] == "alias"


def test_usage_in_each_chunk(urls: dict[str, str]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello, who are you?"})):
        chunks = stream(urls["plain"] + path, max_tokens=3, stream_options=options, **asked)
        done = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert done == ([0] if path == CHAT else []) + [1, 2, 3, 3]
        assert {chunk["usage"]["total_tokens"] - tokens for chunk, tokens in zip(chunks, done, strict=True)} == {
            chunks[-1]["usage"]["prompt_tokens"]
        }


def test_the_messages_api_counts_cached_tokens_apart(urls: dict[str, str]) -> None:
    asked = {"messages": [{"role": "user", "content": "Count these words. " * 20}], "max_tokens": 2}
    first, again = (post(urls["slow"] + MESSAGES, **asked)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < again["cache_read_input_tokens"]
    everything = post(f"{urls['slow']}{MESSAGES}/count_tokens", **asked)["input_tokens"]
    for usage in (first, again, stream(urls["slow"] + MESSAGES, **asked)[-2]["usage"]):
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(usage[part] for part in parts) == everything


@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        (
            CHAT,
            {"model": "nope", "messages": HELLO},
            404,
            "The model `nope` does not exist. Valid aliases: alias, other.",
        ),
        (
            CHAT,
            {"messages": []},
            400,
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
        ),
        (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature must be non-negative, got -1.0."),
        (CHAT, {"messages": HELLO, "temperature": 3}, 400, "temperature must be in [0, 2], got 3.0."),
        (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p must be in (0, 1], got 0.0."),
        (CHAT, {"messages": HELLO, "min_p": 2}, 400, "min_p must be in [0, 1], got 2.0."),
        (CHAT, {"messages": HELLO, "n": 0}, 400, "n must be at least 1, got 0."),
        (CHAT, {"messages": HELLO, "n": 99999}, 400, "n must be at most 16384, got 99999."),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        (
            CHAT,
            {"messages": HELLO, "max_tokens": 5000},
            400,
            "max_tokens=5000 cannot be greater than max_model_len=2048.",
        ),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 5000}, 400, "max_completion_tokens=5000 cannot be greater"),
        (RESPONSES, {"input": "a", "max_output_tokens": 5000}, 400, "max_output_tokens=5000 cannot be greater"),
        (CHAT, {"messages": HELLO, "min_tokens": -1}, 400, "min_tokens must be greater than or equal to 0, got -1."),
        (
            *(CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 4}, 400),
            "min_tokens must be less than or equal to max_tokens=4, got 9.",
        ),
        (CHAT, {"messages": LONG, "stream": True}, 400, "However, your prompt contains at least 2049 input tokens,"),
        (COMPLETIONS, {"prompt": [5] * 2048}, 400, "max_tokens must be at least 1, got 0."),
        (CHAT, {"messages": HELLO, "min_p": 0.1}, 400, "not yet supported with speculative decoding"),
        (CHAT, {"messages": HELLO, "response_format": BY_SCHEMA | {"json_schema": {"schema": 5}}}, 400, "Invalid JSON"),
        (CHAT, {"messages": HELLO, "tools": [{"function": {}}], "tool_choice": "required"}, 400, "Invalid JSON schema"),
        (CHAT, {"messages": HELLO, "tools": []}, 400, "`tools` must not be an empty array."),
        (CHAT, {"messages": HELLO, "tool_choice": "auto"}, 400, "When using `tool_choice`, `tools` must be set."),
        (
            *(
                CHAT,
                {"messages": HELLO, "tools": [{"function": FUNCTION}], "tool_choice": {"function": {"name": "x"}}},
                400,
            ),
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
        ),
        (RESPONSES, {"input": "a", "tool_choice": "required"}, 400, "must be specified with 'tools' parameter."),
        (CHAT, {"messages": HELLO, "n": 2, "temperature": 0}, 400, "n must be 1 when using greedy sampling, got 2."),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "Stream options can only"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, 400, "stop cannot contain an empty string"),
        (COMPLETIONS, {}, 400, "Either prompt or prompt_embeds must be provided and non-empty."),
        (COMPLETIONS, {"prompt": []}, 400, "You must pass at least one prompt"),
        (COMPLETIONS, {"prompt": [999999]}, 400, "999999 is out of vocabulary"),
        (RESPONSES, {"input": "And?", "previous_response_id": "resp_1"}, 404, "'resp_1' not found"),
        (RESPONSES, {"input": "a", "background": True}, 400, "does not support the background mode"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1 is out of vocabulary"),
    ],
)
def test_refusals(urls: dict[str, str], path: str, content: Any, status: int, message: str) -> None:
    replica = urls["locked" if status == 404 else "lookup"]
    answer = httpx.post(replica + path, json=content, headers={"authorization": "Bearer s3cret"})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize(
    ("path", "content", "message", "param"),
    [
        (
            *(CHAT, {"messages": HELLO, "temperature": "x"}),
            "1 validation error:\n  {'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Input should be a "
            "valid number, unable to parse string as a number', 'input': 'x'}",
            "body.temperature",
        ),
        (
            *(CHAT, {"model": MODEL}),
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': "
            "'<dict of 1 items>'}",
            "body.messages",
        ),
        (
            *(CHAT, b'{"messages":'),
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.12', 'msg': 'JSON decode error', 'input': "
            "'<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
            "body.12",
        ),
        (
            *(CHAT, {"messages": HELLO, "stop": 5}),
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid "
            "string', 'input': '5'}\n  {'type': 'list_type', 'loc': 'body.stop', 'msg': 'Input should be a valid "
            "list', 'input': '5'}",
            "body.stop",
        ),
        (
            *(MESSAGES, {"model": MODEL, "messages": HELLO}),
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.max_tokens', 'msg': 'Field required', 'input': "
            "'<dict of 2 items>'}",
            "body.max_tokens",
        ),
    ],
)
def test_a_body_of_wrong_form_is_refused_in_the_words_of_vllm(
    urls: dict[str, str], path: str, content: Any, message: str, param: str
) -> None:
    content = content if isinstance(content, bytes) else json.dumps(content)
    answer = httpx.post(urls["plain"] + path, content=content, headers={"content-type": "application/json"})
    error = {"message": message, "type": "Bad Request", "param": param, "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": error})


def test_a_body_that_is_no_json_text_is_refused(urls: dict[str, str]) -> None:
    answer = httpx.post(urls["plain"] + CHAT, content=b'"\xff"', headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()) == (400, {"detail": "There was an error parsing the body"})
    answer = httpx.post(urls["plain"] + CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.json()["error"]["message"].endswith("Only 'application/json' is allowed")
    many = httpx.post(urls["plain"] + COMPLETIONS, json={"prompt": [{}] * 20}).json()["error"]["message"]
    assert many.startswith("61 validation errors:\n")
    assert many.endswith("...and 51 more errors")


def test_the_messages_api_refuses_in_its_own_format(urls: dict[str, str]) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        answer = httpx.post(urls["plain"] + path, json={"model": "nope", "messages": HELLO, "max_tokens": 2})
        message = f"The model `nope` does not exist. Valid aliases: {MODEL}."
        assert (answer.status_code, answer.json()) == (
            *(404,),
            {"type": "error", "error": {"type": "NotFoundError", "message": message}},
        )


def test_what_is_left_to_the_engine_is_no_error(urls: dict[str, str]) -> None:
    asked = {"n": None, "stop": None, "stream_options": None, "max_tokens": None, "temperature": None}
    assert len(chat(urls["plain"], **asked)["choices"]) == 1


def test_a_min_p_without_effect_may_be_drafted_with(urls: dict[str, str]) -> None:
    for asked in ({"min_p": 0.1, "temperature": 0}, {"min_p": 1e-6}):
        assert chat(urls["lookup"], **asked)["usage"]["completion_tokens"] == 20


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
