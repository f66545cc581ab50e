"""Streams cut anywhere and continued by another engine, without sockets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.rooms.rescue.continued import ContinuedStream, InexactSeamError, ends_within_character
from gateway.rooms.rescue.passed import MAX_CHARS, PassedStream
from gateway.rooms.rescue.request import RescuableRequest, rescuable
from policies.features.request import Endpoint
from tests.support.token_engine import PIECES, TokenEngine, answer_of, decode

CHAT = Endpoint.CHAT
CHARACTERS = ([100, 101], [102, 103, 104, 105])  # in several tokens
SCRIPTS = st.lists(
    st.one_of(st.integers(0, len(PIECES) - 1).map(lambda token: [token]), st.sampled_from(CHARACTERS)),
    min_size=1,
    max_size=30,
).map(lambda parts: [token for part in parts for token in part])


def request_of(endpoint: Endpoint, **fields: Any) -> tuple[dict[str, Any], RescuableRequest]:
    content = {"messages": [{"role": "user", "content": "hi"}]} if endpoint is CHAT else {"prompt": "hi"}
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": None}
    body |= content | fields
    request = rescuable(endpoint, json.dumps(body).encode(), body)
    assert request is not None
    return body, request


def cut_and_continued(
    endpoint: Endpoint,
    script: Sequence[int],
    body: dict[str, Any],
    request: RescuableRequest,
    cuts: Sequence[int],
    step: int,
) -> bytes:
    """Return what a client gets if the first engine, and each that goes on, is cut after some events."""
    passed = PassedStream()
    events = list(TokenEngine(script, step, "a").events(json.loads(request.body), chat=endpoint is CHAT))
    client = b"".join([passed.take(event) for event in events[: min(cuts[0], len(events) - 1)]])
    for number, cut in enumerate([*cuts[1:], None]):
        assert passed.is_exact
        if passed.finish_reason:
            return client + ContinuedStream(request, passed).close(passed.finish_reason)
        if not passed.text:
            passed.drop_ids(len(passed.ids))
        while passed.ids and ends_within_character(passed.text, decode(passed.ids.tolist())):
            passed.drop_ids(1)
        continued = ContinuedStream(request, passed)
        is_again_chat = endpoint is CHAT and not passed.ids
        sent = json.loads(
            request.continuation(passed.prompt_ids.tolist(), passed.ids.tolist(), 2048) if passed.ids else request.body
        )
        engine = TokenEngine(script, step + 1, f"b{number}")
        for event in list(engine.events(sent, chat=is_again_chat))[:cut]:
            client += continued.feed(event[:9]) + continued.feed(event[9:])
            if continued.is_done:
                return client
    raise AssertionError("the last engine did not complete the stream")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([CHAT, Endpoint.COMPLETIONS]), SCRIPTS, st.integers(1, 3), st.data())
def test_a_stream_cut_anywhere_reads_as_if_it_had_not_been(
    endpoint: Endpoint, script: list[int], step: int, data: st.DataObject
) -> None:
    limit = data.draw(st.one_of(st.none(), st.integers(1, 40)), "max_tokens")
    body, request = request_of(endpoint, max_tokens=limit)
    events = list(TokenEngine(script, 1).events(body, chat=endpoint is CHAT))
    uninterrupted = answer_of(b"".join(events))
    cuts = data.draw(st.lists(st.integers(1, len(events)), min_size=1, max_size=2), "cuts")
    client = cut_and_continued(endpoint, script, body, request, cuts, step)

    text, reason, usage = answer_of(client)
    assert (text, reason) == uninterrupted[:2]
    assert usage["prompt_tokens"] == uninterrupted[2]["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == uninterrupted[2]["completion_tokens"]
    documents = [json.loads(line[6:]) for line in client.split(b"\n") if line.startswith(b"data: {")]
    assert len({(each["id"], each["created"], each["object"], each["model"]) for each in documents}) == 1
    assert client.endswith(b"data: [DONE]\n\n")
    assert client.count(b"[DONE]") == client.count(b'"usage":{') == 1
    assert client.count(b'"role"') == (endpoint is CHAT)
    assert b'token_ids":[' not in client


@pytest.mark.parametrize("decoded", ["", "a", "abc", "<think>so</think>ab", "ab<|im_start|>c"])
def test_a_text_that_is_not_that_of_the_tokens_is_not_continued(decoded: str) -> None:
    with pytest.raises(InexactSeamError):
        ends_within_character("ab", decoded)


@pytest.mark.parametrize("decoded", ["ab", "a<|im_end|>b", "<s>ab", "ab<|im_end|>", "<a><b>ab[PAD]"])
def test_special_tokens_are_in_no_text_and_part_of_a_character_is_dropped(decoded: str) -> None:
    assert not ends_within_character("ab", decoded)
    assert ends_within_character("ab", f"{decoded}\ufffd")


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "a"}},
        {"delta": {"content": "a"}, "token_ids": None},
        {"delta": {"reasoning_content": "a"}, "token_ids": [1]},
        {"delta": {"tool_calls": [{"index": 0}]}, "token_ids": [1]},
        {"text": None, "token_ids": [1]},
        {"text": "a", "token_ids": [-1]},
    ],
)
def test_what_is_not_text_with_known_tokens_is_not_continued(choice: dict[str, Any]) -> None:
    passed = PassedStream()
    passed.take(b"data: " + json.dumps({"id": "x", "prompt_token_ids": [1], "choices": [choice]}).encode() + b"\n\n")
    assert not passed.is_exact


def test_a_long_text_is_not_kept() -> None:
    passed = PassedStream()
    event = {"id": "x", "prompt_token_ids": [1], "choices": [{"index": 0, "text": "a" * 50_000, "token_ids": [1]}]}
    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    for _ in range(MAX_CHARS // 50_000 + 3):
        assert b'"token_ids":null' in passed.take(data)
    assert not passed.is_exact
    assert not passed.text


def test_ids_are_taken_out_of_events_not_of_texts_and_those_of_a_long_prompt_are_kept_unread() -> None:
    text, prompt = '\\"token_ids\\":[1]', b"[%b7]" % (b"12345," * 50_000)
    event = b'data: {"id":"x","prompt_token_ids":%b,"choices":[{"index":0,"text":"%b","token_ids":%b}]}\n\n'
    for space in (b"", b" "):
        given = event.replace(b'ids":', b'ids":' + space)
        passed = PassedStream()
        assert passed.take(given % (prompt, text.encode(), b"[5]")) == given % (b"null", text.encode(), b"null")
        assert passed.take(given % (b"null", b"b", b"[6,7]") * 2) == given % (b"null", b"b", b"null") * 2
        assert len(passed.prompt_ids) == 0
        assert passed.is_exact
        assert (len(passed.prompt_ids), passed.ids.tolist()) == (50_001, [5, 6, 7, 6, 7])


@pytest.mark.parametrize(
    "document",
    [
        '{"choices":[{"index":0,"text":"b","token_ids":[2],"finish_reason":"abort"}]}',
        '{"choices":[{"index":0,"text":"b","token_ids":[2],"finish_reason":null}]}',
        '{"choices":[],"usage":7}',
        '{"choices":[{"text":"b","token_ids":["a"]}]}',
        '{"error":{"message":"no"}}',
        "[]",
        "no JSON",
    ],
)
def test_a_rest_that_its_engine_gives_up_or_garbles_is_not_passed_on_as_an_end(document: str) -> None:
    passed = PassedStream()
    passed.take(b'data: {"id":"x","prompt_token_ids":[1],"choices":[{"index":0,"text":"a","token_ids":[1]}]}\n\n')
    assert passed.is_exact
    continued = ContinuedStream(request_of(Endpoint.COMPLETIONS)[1], passed)
    client = continued.feed(f"data: {document}\n\ndata: [DONE]\n\n".encode())
    assert (continued.has_error, continued.is_done) == (True, False)
    assert b"abort" not in client
    assert b"[DONE]" not in client
    assert (passed.finish_reason, passed.text[:1]) == ("", "a")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"stream": False},
        {"logprobs": 0},  # of the token itself
        {"seed": 3},
        {"stop": "a"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": False},
        {"max_tokens": "9"},
        {"a_parameter_of_next_year": 1},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": "x" * (1 << 19)}]},
        {"prompt": [[1], [2]]},
        {"prompt": 3},
    ],
)
def test_a_request_with_what_does_not_hold_across_the_seam_is_excluded(fields: dict[str, Any]) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
    endpoint = Endpoint.COMPLETIONS if "prompt" in fields else CHAT
    assert rescuable(endpoint, json.dumps(body).encode(), body) is None


def test_the_continuation_has_the_parameters_of_the_request_and_smaller_limits() -> None:
    fields = {"temperature": 0, "seed": 3, "n": 1, "max_completion_tokens": 9, "min_tokens": 4, "user": "u", "top_k": 5}
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    request = rescuable(CHAT, json.dumps(body | fields).encode(), body | fields)
    assert json.loads(request.body) == body | fields | {"return_token_ids": True}
    sampling = {"temperature": 0, "user": "u", "top_k": 5, "max_tokens": 8, "min_tokens": 3}
    rest = {"model": "m", "stream": True, "prompt": [1, 2, 3], "return_token_ids": True}
    assert json.loads(request.continuation([1, 2], [3], 64)) == rest | sampling


def test_the_continuation_has_the_priority_that_the_gateway_has_given_the_request() -> None:
    body = {"model": "m", "stream": True, "prompt": "hi", "priority": -99}
    request = rescuable(Endpoint.COMPLETIONS, json.dumps(body | {"priority": 0}).encode(), body)
    assert json.loads(request.continuation([1], [2], 64))["priority"] == 0


def test_parameters_that_are_off_exclude_nothing() -> None:
    request_of(CHAT, presence_penalty=0, frequency_penalty=0.0, logprobs=False, top_logprobs=0, tools=[], stop=None)


def test_a_chat_without_a_limit_has_the_rest_of_the_context_and_a_completion_16_tokens() -> None:
    _, chat = request_of(CHAT)
    assert json.loads(chat.continuation([1], [2], 64))["max_tokens"] == 62
    _, completion = request_of(Endpoint.COMPLETIONS)
    assert json.loads(completion.continuation([1], [2], 64))["max_tokens"] == 15


@pytest.mark.parametrize(("reads", "is_exact"), [(3, True), (40, False)])
def test_what_comes_faster_than_it_is_parsed_is_parsed_in_pieces_up_to_a_bound(reads: int, is_exact: bool) -> None:
    passed = PassedStream()
    event = b'data: {"id":"x","prompt_token_ids":[1],"choices":[{"index":0,"text":"a","token_ids":[7]}]}\n\n'
    for _ in range(reads):
        passed.take(event * 3000)
    assert len(passed.ids) < (reads * 3000 if is_exact else 1)
    assert passed.is_exact is is_exact
    assert len(passed.ids) == (reads * 3000 if is_exact else 0)
