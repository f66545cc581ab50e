"""Answers have the fields of vLLM 0.32, in its order."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

MODEL = "llama-3.1-8b"
CODE = "\n".join(
    f"def step_{index}(value):\n    return value * {index} + step_{index + 1}(value)\n" for index in range(9)
)
REPEAT = [{"role": "user", "content": f"Repeat this code exactly:\n```python\n{CODE}\n```"}]
HELLO = [{"role": "user", "content": "Hello, who are you?"}]

CHAT_KEYS = [
    *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs"),
    *("prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
]
CHAT_CHOICE_KEYS = [
    *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"),
]
MESSAGE_KEYS = ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
COMPLETION_KEYS = [
    *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
]
COMPLETION_CHOICE_KEYS = [
    *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
    *("prompt_token_ids", "routed_experts"),
]
USAGE_KEYS = [
    *("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"),
]
CACHE_KEYS = ["cached_tokens", "created_cache_tokens", "multimodal_tokens"]
METRICS_KEYS = [
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
    "speculative_decoding",
]
SPECULATION_KEYS = [
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"),
    *("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens", "per_step_accepted", "per_step_drafted"),
]


@pytest.fixture(scope="module")
def urls(simulator: Any) -> dict[str, str]:
    return simulator.urls  # type: ignore[no-any-return]


def post(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(url, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def chat(url: str, **body: Any) -> dict[str, Any]:
    answer = post(f"{url}/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 20, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def stream(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; fail unless it is well-formed."""
    answer = post(url + path, {"model": MODEL, "stream": True, "max_tokens": 20, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-2])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_models(urls: dict[str, str]) -> None:
    answer = httpx.get(f"{urls['locked']}/v1/models", headers={"authorization": "Bearer s3cret"})
    entries = answer.json()["data"]
    assert [entry["id"] for entry in entries] == ["alias", "other"]
    assert list(entries[0]) == [
        *("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"),
    ]
    assert (entries[0]["root"], entries[0]["max_model_len"]) == (MODEL, 2048)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health", b""),
        ("/ping", b""),
        ("/version", b'{"version":"0.32.0+simulated"}'),
        ("/load", b'{"server_load":0}'),
    ],
)
def test_endpoints_without_a_request_body(urls: dict[str, str], path: str, body: bytes) -> None:
    answer = httpx.get(urls["plain"] + path)
    assert (answer.status_code, answer.content) == (200, body)
    assert answer.headers["x-simulated"] == "true"
    assert answer.headers["vary"] == "Origin"


def test_a_complete_chat_completion(urls: dict[str, str]) -> None:
    answer = post(
        f"{urls['lookup']}/v1/chat/completions",
        {"messages": REPEAT, "temperature": 0, "max_tokens": 80},
        x_request_id="my-req-1",
    )
    assert answer.headers["x-request-id"] == "my-req-1"
    assert answer.headers["x-simulated"] == "true"
    body = answer.json()
    assert list(body) == CHAT_KEYS
    assert list(body["choices"][0]) == CHAT_CHOICE_KEYS
    assert list(body["choices"][0]["message"]) == MESSAGE_KEYS
    assert list(body["usage"]) == USAGE_KEYS
    assert list(body["usage"]["prompt_tokens_details"]) == CACHE_KEYS
    assert list(body["metrics"]) == METRICS_KEYS
    assert list(body["metrics"]["speculative_decoding"]) == SPECULATION_KEYS
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-my-req-1", "chat.completion", MODEL)
    assert "simulated" in body["system_fingerprint"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 80
    assert body["choices"][0]["message"]["content"] in f"```python\n{CODE}"


def test_the_metrics_of_a_request_are_consistent(urls: dict[str, str]) -> None:
    body = chat(urls["lookup"], messages=REPEAT, temperature=0, max_tokens=150)
    speculation = body["metrics"]["speculative_decoding"]
    accepted, drafted = speculation["per_step_accepted"], speculation["per_step_drafted"]
    assert speculation["num_spec_tokens"] == 5
    assert speculation["num_spec_steps"] == len(accepted) == len(drafted) == sum(speculation["acceptance_histogram"])
    assert speculation["num_accepted_draft_tokens"] == sum(accepted)
    assert speculation["num_draft_tokens"] == sum(drafted)
    assert speculation["acceptance_histogram"] == [accepted.count(count) for count in range(6)]
    assert speculation["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert speculation["mean_acceptance_length"] > 3, "a copy is drafted well"
    metrics, tokens = body["metrics"], body["usage"]["completion_tokens"]
    whole_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert metrics["tokens_per_second"] == pytest.approx(tokens / whole_ms * 1e3)
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / (tokens - 1))


def test_a_baseline_has_no_speculation_metrics(urls: dict[str, str]) -> None:
    assert chat(urls["plain"])["metrics"]["speculative_decoding"] is None


def test_replicas_of_a_model_answer_greedy_requests_alike(urls: dict[str, str]) -> None:
    answers = {
        chat(urls[name], messages=HELLO, temperature=0, max_tokens=60)["choices"][0]["message"]["content"]
        for name in ("plain", "lookup", "eagle3")
    }
    assert len(answers) == 1


def test_a_seed_repeats_a_sample_on_any_replica(urls: dict[str, str]) -> None:
    answers = [
        chat(urls[name], temperature=1, seed=seed)["choices"][0]["message"]["content"]
        for name, seed in (("plain", 1), ("lookup", 1), ("lookup", 2))
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_chat_stream_without_usage(urls: dict[str, str]) -> None:
    events = stream(urls["lookup"], "/v1/chat/completions", messages=REPEAT, temperature=0, max_tokens=40)
    first, *steps = events
    fixed = ["id", "object", "created", "model", "choices"]
    assert list(first) == [*fixed, "prompt_token_ids", "prompt_text"]
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for step in steps[:-1]:
        assert list(step) == fixed
        assert list(step["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
        assert list(step["choices"][0]["delta"]) == ["content"]
    last = steps[-1]
    assert list(last) == [*fixed, "system_fingerprint"]
    assert list(last["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    text = "".join(step["choices"][0]["delta"]["content"] for step in steps)
    whole = chat(urls["plain"], messages=REPEAT, temperature=0, max_tokens=40)
    assert text == whole["choices"][0]["message"]["content"]


def test_a_chat_stream_with_usage_and_token_ids(urls: dict[str, str]) -> None:
    events = stream(
        urls["lookup"],
        "/v1/chat/completions",
        messages=REPEAT,
        temperature=0,
        max_tokens=60,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
    )
    first, *steps, last = events
    prompt_tokens = len(first["prompt_token_ids"])
    usage_keys = ["prompt_tokens", "total_tokens", "completion_tokens", "completion_tokens_details"]
    assert list(first)[-3:] == ["usage", "prompt_token_ids", "prompt_text"]
    assert first["usage"] == dict(zip(usage_keys, (prompt_tokens, prompt_tokens, 0, None), strict=True))
    sent = 0
    for step in steps:
        sent += len(step["choices"][0]["token_ids"])
        assert list(step["usage"]) == usage_keys
        assert step["usage"]["completion_tokens"] == sent
        assert "system_fingerprint" not in step
    assert sent == 60
    assert len(steps) < 30, "several tokens to a chunk"
    assert list(last)[4:] == ["choices", "usage", "system_fingerprint", "metrics"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == prompt_tokens + 60
    assert list(last["usage"]["prompt_tokens_details"]) == ["cached_tokens", "created_cache_tokens"]
    accepted = last["metrics"]["speculative_decoding"]["per_step_accepted"]
    drafting_steps = [len(step["choices"][0]["token_ids"]) for step in steps]
    assert sum(accepted) == 60 - len(drafting_steps), "one content chunk is one step"


def test_a_baseline_stream_has_one_token_per_chunk(urls: dict[str, str]) -> None:
    events = stream(
        urls["plain"],
        "/v1/chat/completions",
        messages=REPEAT,
        temperature=0,
        max_tokens=30,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    assert [len(event["choices"][0]["token_ids"]) for event in events[1:-1]] == [1] * 30
    assert "speculative_decoding" not in events[-1]["metrics"]


def test_a_complete_completion(urls: dict[str, str]) -> None:
    answer = post(f"{urls['lookup']}/v1/completions", {"prompt": "def main(", "max_tokens": 24, "logprobs": 2})
    body = answer.json()
    assert list(body) == COMPLETION_KEYS
    choice = body["choices"][0]
    assert list(choice) == COMPLETION_CHOICE_KEYS
    assert list(choice["logprobs"]) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"])
    assert body["usage"]["prompt_tokens_details"]["created_cache_tokens"] is None
    assert body["id"].startswith("cmpl-")


def test_a_completion_stream(urls: dict[str, str]) -> None:
    events = stream(
        urls["lookup"], "/v1/completions", prompt="def main(", temperature=0, stream_options={"include_usage": True}
    )
    for event in events[:-1]:
        assert list(event) == ["id", "object", "created", "model", "choices"]
        assert list(event["choices"][0]) == [
            *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"),
        ]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert list(events[-1]) == [
        *("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "metrics"),
    ]
    assert list(events[-1]["usage"]["prompt_tokens_details"]) == ["cached_tokens"]


def test_prompts_in_all_forms(urls: dict[str, str]) -> None:
    url = f"{urls['plain']}/v1/completions"
    ids = post(f"{urls['plain']}/tokenize", {"prompt": "class Thing:"}).json()["tokens"]
    forms = ["class Thing:", ["class Thing:", "import os"], ids, [ids, [5, 6, 7]]]
    answers = [post(url, {"prompt": form, "max_tokens": 8, "temperature": 0}).json() for form in forms]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert [len(each) for each in texts] == [1, 2, 1, 2]
    assert len({each[0] for each in texts}) == 1, "text and its ids are the same prompt"
    assert [choice["index"] for choice in answers[3]["choices"]] == [0, 1]
    assert answers[3]["usage"]["prompt_tokens"] == len(ids) + 3


def test_echoed_prompts(urls: dict[str, str]) -> None:
    url = f"{urls['plain']}/v1/completions"
    echoed = post(url, {"prompt": "def main(", "max_tokens": 8, "temperature": 0, "echo": True}).json()
    plain = post(url, {"prompt": "def main(", "max_tokens": 8, "temperature": 0}).json()
    assert echoed["choices"][0]["text"] == "def main(" + plain["choices"][0]["text"]
    only = post(url, {"prompt": "def main(", "max_tokens": 0, "echo": True}).json()
    assert only["choices"][0]["text"] == "def main("


def test_several_choices(urls: dict[str, str]) -> None:
    body = chat(urls["lookup"], n=3, seed=5)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert body["metrics"] is None
    assert body["usage"]["completion_tokens"] == 60
    events = stream(urls["lookup"], "/v1/chat/completions", messages=HELLO, n=3, seed=5)
    streamed = ["", "", ""]
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert streamed == texts


def test_stop_strings(urls: dict[str, str]) -> None:
    whole = chat(urls["plain"], temperature=0, max_tokens=60)["choices"][0]["message"]["content"]
    stop = whole[40:43]
    cut = chat(urls["plain"], temperature=0, max_tokens=60, stop=[stop, "never said"])["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = chat(urls["plain"], temperature=0, max_tokens=60, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["message"]["content"] == whole[: whole.index(stop)] + stop
    events = stream(urls["lookup"], "/v1/chat/completions", messages=HELLO, temperature=0, max_tokens=60, stop=stop)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == cut["message"]["content"]


@pytest.mark.slow
def test_stop_tokens_and_lengths(urls: dict[str, str]) -> None:
    whole = chat(urls["plain"], temperature=0, return_token_ids=True)["choices"][0]
    token = whole["token_ids"][7]
    first = whole["token_ids"].index(token)
    cut = chat(urls["plain"], temperature=0, stop_token_ids=[token], return_token_ids=True)["choices"][0]
    assert cut["token_ids"] == whole["token_ids"][: first + 1]
    assert cut["stop_reason"] == token
    long = chat(urls["plain"], max_tokens=1500, ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 1500
    least = chat(urls["plain"], max_tokens=1900, min_tokens=1200)
    assert least["usage"]["completion_tokens"] > 1200
    prior = chat(urls["plain"], max_tokens=5, max_completion_tokens=9, ignore_eos=True)
    assert prior["usage"]["completion_tokens"] == 9


def test_log_probabilities_of_a_chat(urls: dict[str, str]) -> None:
    body = chat(urls["lookup"], temperature=0, logprobs=True, top_logprobs=3, max_tokens=30)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 30
    for entry in content:
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert 1 <= len(tops) <= 3
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] in tops
    events = stream(urls["lookup"], "/v1/chat/completions", messages=HELLO, temperature=0, logprobs=True, max_tokens=30)
    streamed = [entry["token"] for event in events[1:] for entry in event["choices"][0]["logprobs"]["content"]]
    assert streamed == [entry["token"] for entry in content]


def test_tokenize_and_detokenize(urls: dict[str, str]) -> None:
    url = urls["plain"]
    body = post(f"{url}/tokenize", {"model": MODEL, "prompt": "def f(x): return x"}).json()
    assert list(body) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (body["count"], body["token_strs"]) == (len(body["tokens"]), None)
    assert post(f"{url}/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "def f(x): return x"}
    chat_body = post(f"{url}/tokenize", {"messages": HELLO, "return_token_strs": True}).json()
    assert chat_body["token_strs"][0] == "<|im_start|>"
    assert chat_body["count"] == chat(url)["usage"]["prompt_tokens"]


def test_the_same_prompt_is_found_in_the_cache(urls: dict[str, str]) -> None:
    first = chat(urls["eagle3"], messages=REPEAT, max_tokens=2)["usage"]
    again = chat(urls["eagle3"], messages=REPEAT, max_tokens=2)["usage"]
    full_blocks = first["prompt_tokens"] // 16 * 16
    assert first["prompt_tokens_details"]["created_cache_tokens"] == full_blocks
    assert again["prompt_tokens_details"]["cached_tokens"] >= full_blocks - 16


def test_ids_of_answers(urls: dict[str, str]) -> None:
    url, body = f"{urls['plain']}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "request_id": "in-body"}
    assert post(url, body).json()["id"] == "chatcmpl-in-body"
    assert post(url, body, x_request_id="in-head").json()["id"] == "chatcmpl-in-head"
    answer = post(url, {"messages": HELLO, "max_tokens": 2})
    assert len(answer.json()["id"].removeprefix("chatcmpl-")) == 16
    assert len(answer.headers["x-request-id"]) == 32
