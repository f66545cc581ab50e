"""Asking for usage in place of the client, and hiding that."""

from __future__ import annotations

import json

import pytest

from gateway.dialects.asked_usage import StreamHabits, asking, options_to_ask

LAST = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
MARKED = LAST.replace(b"}]}\n\n", b'}],"system_fingerprint":"v1"}\n\n')
CHUNK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"say \\"usage\\": 1"},"finish_reason":null}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"completion_tokens":2},"system_fingerprint":"v1"}\n\n'
DONE = b"data: [DONE]\n\n"


def learned(events: bytes) -> StreamHabits:
    habits = StreamHabits()
    habits.learn(events)
    return habits


@pytest.mark.parametrize(
    "reads", [[CHUNK + LAST + USAGE + DONE], [CHUNK, LAST, USAGE, DONE], [CHUNK + LAST, USAGE + DONE]]
)
def test_the_client_gets_the_bytes_of_a_stream_without_usage(reads: list[bytes]) -> None:
    habits = learned(CHUNK + MARKED + DONE)
    assert b"".join(habits.hide(read) for read in reads) == CHUNK + MARKED + DONE


def test_each_choice_has_its_fingerprint() -> None:
    other = LAST.replace(b'"index":0', b'"index":1')
    expected = MARKED + MARKED.replace(b'"index":0', b'"index":1')
    assert learned(MARKED).hide(LAST + other + USAGE) == expected


def test_a_new_version_of_the_engine_is_named_from_the_next_stream_on() -> None:
    habits = learned(MARKED)
    habits.hide(LAST + USAGE.replace(b"v1", b"v2"))
    assert habits.hide(LAST) == MARKED.replace(b"v1", b"v2")


def test_what_the_first_stream_shows_holds_for_the_life_of_the_engine() -> None:
    assert not StreamHabits().may_ask
    for first, may_ask in ((LAST + USAGE + DONE, False), (LAST + DONE, True)):
        habits = learned(first)
        assert habits.may_ask is may_ask
        habits.learn(LAST + DONE)
        habits.learn(LAST + USAGE + DONE)
        assert habits.may_ask is may_ask


@pytest.mark.parametrize("space", [b"", b" "])
@pytest.mark.parametrize("usage", [b'{"prompt_tokens":{"a":[{"}":"\xc3\xa4"}]}}', b"null", b"7"])
@pytest.mark.parametrize("place", ["first", "last", "between"])
def test_usage_in_whatever_event_is_taken_out_where_it_was_asked_for(space: bytes, usage: bytes, place: str) -> None:
    field = b'"usage":%b%b' % (space, usage)
    events = []
    for event in (CHUNK, LAST):
        before, comma, rest = event.partition(b",")
        if place == "first":
            before = before.replace(b"{", b"{%b,%b" % (field, space))
        elif place == "last":
            rest = rest.replace(b"}]}\n", b"}],%b%b}\n" % (space, field))
        else:
            rest = b"%b%b,%b" % (space, field, rest)
        events.append(before + comma + rest)
    for reads in (events, [b"".join(events)]):
        assert b"".join(map(learned(LAST).hide, reads)) == CHUNK + LAST
    null = LAST.replace(b"}]}\n", b'}],"usage":%bnull}\n' % space)
    told = null.replace(b"null", usage)
    assert learned(null).hide(told) == null


@pytest.mark.parametrize(
    "last",
    [USAGE, USAGE.replace(b'"choices":[],', b""), USAGE.replace(b"[]", b"[ ]"), USAGE.replace(b'":', b'": ')],
)
def test_no_client_gets_an_event_without_choices_that_it_did_not_ask_for(last: bytes) -> None:
    assert learned(LAST).hide(CHUNK + LAST + last + DONE) == CHUNK + LAST + DONE


def test_events_with_names_and_other_line_ends() -> None:
    named = b"id: 7\r\n" + USAGE.replace(b"\n", b"\r\n")
    chunk, done = CHUNK.replace(b"\n", b"\r\n"), DONE.replace(b"\n", b"\r\n")
    assert learned(LAST).hide(chunk + named + done) == chunk + done


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"stream": true, "n": 1.0}', '{"stream_options":{"include_usage":true},"stream": true, "n": 1.0}'),
        ('{"stream_options": null, "stream": true}', '{"stream_options":{"include_usage":true},"stream":true}'),
        (
            '{"stream": true, "stream_options": {"include_usage": false, "continuous_usage_stats": true, "x": 1}}',
            '{"stream":true,"stream_options":{"include_usage":true,"x":1}}',
        ),
        (
            '{"stream": true, "stream_options": {}, "stream_options": null, "a": {"stream_options": 1}}',
            '{"stream":true,"stream_options":{"include_usage":true},"a":{"stream_options":1}}',
        ),
    ],
)
def test_the_request_asks_and_is_else_as_it_was(given: str, expected: str) -> None:
    options = options_to_ask(json.loads(given))
    assert options is not None
    assert asking(given.encode(), options).decode() == expected


@pytest.mark.parametrize(
    "given",
    [
        '{"stream": true, "stream_options": {"include_usage": true}}',
        '{"stream": true, "stream_options": 7}',
    ],
)
def test_requests_that_are_left_alone(given: str) -> None:
    assert options_to_ask(json.loads(given)) is None
