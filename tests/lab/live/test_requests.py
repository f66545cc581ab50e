"""Requests built from records, with generated text for records that only have lengths."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from lab.live.requests import EndpointInfo, LiveRequests, api_of
from lab.live.texts import Texts, TokenScale
from lab.trace.record import TraceRecord


def body_of(record: TraceRecord, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"seed": "0", "ignore_eos": False} | options
    scales = {"chat": TokenScale(fixed=10.0), "completions": TokenScale()}
    requests = LiveRequests([record], EndpointInfo(("served", "other"), "served", scales), **given)
    document: dict[str, Any] = orjson.loads(requests(0).body)
    return document


def test_a_recorded_prompt_is_sent_unchanged() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = TraceRecord(messages=messages, prompt="not this", prompt_tokens=9, temperature=0.3, top_p=0.9)
    assert (api_of(chat), body_of(chat)["messages"]) == ("chat", messages)
    assert (body_of(chat)["temperature"], body_of(chat)["top_p"]) == (0.3, 0.9)
    text = TraceRecord(prompt="once upon", prompt_token_ids=[1, 2], prompt_tokens=2)
    assert (api_of(text), body_of(text)["prompt"]) == ("completions", "once upon")
    tokens = TraceRecord(endpoint="chat", prompt_token_ids=[5, 6, 7], prompt_tokens=3)
    assert (api_of(tokens), body_of(tokens)["prompt"]) == ("completions", [5, 6, 7])
    for body in map(body_of, (chat, text, tokens)):
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}


def test_a_generated_prompt_has_the_recorded_length_by_the_engine_s_count() -> None:
    chat = body_of(TraceRecord(prompt_tokens=110))["messages"]
    assert [message["role"] for message in chat] == ["user"]
    assert len(chat[0]["content"].split()) == 100  # plus 10 tokens of the template
    completion = TraceRecord(endpoint="completions", prompt_tokens=110)
    assert api_of(completion) == "completions"
    assert len(body_of(completion)["prompt"].split()) == 110


def test_answers_are_limited_to_their_recorded_length() -> None:
    assert body_of(TraceRecord(prompt_tokens=3, output_tokens=40, max_tokens=500))["max_completion_tokens"] == 40
    assert body_of(TraceRecord(prompt="a", output_tokens=0))["max_tokens"] == 1
    assert body_of(TraceRecord(prompt="a", max_tokens=500))["max_tokens"] == 500
    unknown = body_of(TraceRecord(prompt="a"))
    assert not {"max_tokens", "ignore_eos", "temperature", "top_p"} & unknown.keys()
    assert body_of(TraceRecord(prompt="a", output_tokens=9), ignore_eos=True)["ignore_eos"] is True


def test_a_request_asks_for_its_own_model_if_it_is_served() -> None:
    assert body_of(TraceRecord(model="other", prompt="a"))["model"] == "other"
    assert body_of(TraceRecord(model="gpt-4", prompt="a"))["model"] == "served"


def test_the_workload_is_sent_as_a_header() -> None:
    records = [TraceRecord(prompt="a", workload="code"), TraceRecord(prompt="a"), TraceRecord(workload="é")]
    requests = LiveRequests(records, EndpointInfo((), "m", {"chat": TokenScale()}), seed="0", ignore_eos=False)
    assert [requests(number).headers for number in range(3)] == [[(b"x-gateway-workload", b"code")], [], []]


def test_the_scale_inverts_the_engine_s_token_counts() -> None:
    scale = TokenScale.through((32, 11 + 40), (256, 11 + 320))
    assert (scale.fixed, scale.per_word) == (pytest.approx(11), pytest.approx(1.25))
    assert (scale.words(511), scale.words(3)) == (400, 1)
    assert TokenScale.through((32, 7), (256, 7)) == TokenScale()  # counts that do not increase are ignored


def test_texts_differ_beyond_their_prefix_blocks() -> None:
    texts = Texts(TokenScale(), "seed")
    record = TraceRecord(prompt_tokens=700, prefix_blocks=[7], block_tokens=512)
    one, other = (texts.prompt(record, number).split() for number in (1, 2))
    assert one[:512] == other[:512]
    assert one[512:530] != other[512:530]
    plain = TraceRecord(prompt_tokens=20)
    assert texts.prompt(plain, 1) != texts.prompt(plain, 2)
    assert texts.prompt(plain, 1) == Texts(TokenScale(), "seed").prompt(plain, 1)
    assert texts.prompt(plain, 1) != Texts(TokenScale(), "another").prompt(plain, 1)
    assert texts.prompt(record, 1) != Texts(TokenScale(), "another").prompt(record, 1)
