"""Recorded texts: the relayed answer, and the hashes recorded in its place."""

from __future__ import annotations

import re
from hashlib import blake2b
from random import Random
from typing import Any

import orjson
import pytest

from gateway.dialects.transcript import read_answer
from gateway.rooms.recorder.hashes import TextHasher
from gateway.rooms.recorder.packed import unpack
from gateway.rooms.recorder.units import cut
from policies.features.request import Endpoint

_PIECE = re.compile(r" ?[^\W\d]+| ?\d{1,3}| ?[^\w\s]+|\s+")


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


@pytest.mark.parametrize(
    ("endpoint", "document", "text"),
    [
        (Endpoint.CHAT, choice(message={"content": "hi", "reasoning": "hm "}), "hihm "),
        (Endpoint.COMPLETIONS, {"choices": [{"index": 0, "text": "one"}, {"index": 1, "text": "two"}]}, "one"),
        (Endpoint.MESSAGES, {"content": [{"text": "hi"}, {"type": "tool_use", "input": {"a": 1}}]}, 'hi{"a":1}'),
        (Endpoint.RESPONSES, {"output": [{"content": [{"text": "hi"}]}, {"arguments": "{}"}]}, "hi{}"),
    ],
)
def test_texts_of_answers_in_one_piece(endpoint: Endpoint, document: Any, text: str) -> None:
    assert read_answer(endpoint, orjson.dumps(document), stream=False).text == text
    assert read_answer(endpoint, b"no json", stream=False).text == ""


CHAT = [
    choice(delta={"role": "assistant", "content": ""}),
    choice(delta={"reasoning_content": "a"}),
    {"choices": [{"index": 1, "delta": {"content": "x"}}]},
    choice(delta={"content": "b"}),
    choice(delta={"tool_calls": [{"function": {"name": "c", "arguments": "d"}}]}),
    {"choices": [], "usage": {}},
]
MESSAGES = [
    {"type": "message_start", "message": {"content": []}},
    {"type": "content_block_delta", "delta": {"thinking": "ab"}},
    {"type": "content_block_delta", "delta": {"text": "cd"}},
]
RESPONSES = [
    {"type": "response.output_text.delta", "delta": "abcd"},
    {"type": "response.completed", "response": {"output": [{"content": [{"text": "abcd"}]}]}},
]
COMPLETIONS = [
    choice(text="ab", token_ids=[3]) | {"prompt_token_ids": [1, 2]},
    choice(text="cd", token_ids=[4, 5]),
]


@pytest.mark.parametrize(
    ("endpoint", "events"),
    [
        (Endpoint.CHAT, CHAT),
        (Endpoint.COMPLETIONS, COMPLETIONS),
        (Endpoint.MESSAGES, MESSAGES),
        (Endpoint.RESPONSES, RESPONSES),
    ],
)
def test_texts_and_tokens_of_streams(endpoint: Endpoint, events: list[Any]) -> None:
    stream = b"".join(b"event: e\r\ndata: " + orjson.dumps(event) + b"\r\n\r\n" for event in events)
    for end in (b"", b"data: [DONE]\n\n", b'data: [DONE]\n\ndata: {"cut'):
        transcript = read_answer(endpoint, stream + end, stream=True)
        assert transcript.text == "abcd"
        if endpoint is Endpoint.COMPLETIONS:
            assert (transcript.prompt_token_ids, transcript.token_ids) == ([1, 2], [3, 4, 5])


def test_hashes_are_equal_exactly_where_the_text_is() -> None:
    ids = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7, 8]
    hasher = TextHasher(b"secret")
    prompt, output, hashing = hasher.hash_ids(ids[:5], ids[5:])
    assert [a == b for a in (prompt + output) for b in (prompt + output)] == [a == b for a in ids for b in ids]
    assert max(prompt + output) < 2**53
    assert (hashing.unit, hashing.ngram) == ("token", 1)
    assert TextHasher(b"secret").hash_ids(ids[:5], ids[5:]) == (prompt, output, hashing)
    other_prompt, _, other_hashing = TextHasher(b"another").hash_ids(ids[:5], ids[5:])
    assert not set(other_prompt) & set(prompt)
    assert other_hashing.salt != hashing.salt


def pieces_of(texts: list[str]) -> list[list[str]]:
    """Return the units of texts as strings."""
    return [[unit.decode() for unit in cut(text)] for text in texts]


def test_texts_are_split_as_by_the_regular_expression() -> None:
    draw = Random(1)
    characters = "ab_ 1290.,!\n\t  =x"
    for _ in range(500):
        texts = ["".join(draw.choices(characters, k=draw.randrange(40))) for _ in range(draw.randrange(1, 6))]
        assert pieces_of(texts) == [_PIECE.findall(text) for text in texts]


def test_text_beyond_ascii_is_split_by_its_script() -> None:
    german, chinese, nothing, korean = pieces_of(["zwei Wörter – “ja”", "中文字 和 text", "", "a 안녕 😀"])
    assert german == ["zwei", " Wörter", " –", " “", "ja", "”"]
    assert chinese == ["中", "文", "字", " 和", " text"]
    assert nothing == []
    assert korean == ["a", " 안", "녕", " 😀"]


def test_a_hash_depends_only_on_its_unit() -> None:
    draw, salted = Random(2), blake2b(b"salt", digest_size=32).digest()
    hasher = TextHasher(b"salt")
    words = [" " + "".join(draw.choices("abcdefgh", k=draw.choice((1, 3, 8, 9, 20, 70, 200)))) for _ in range(300)]
    for _ in range(5):
        prompt, output = "".join(draw.choices(words, k=90)), "".join(draw.choices(words, k=50))
        hashes = hasher.hash_text(prompt, output)[:2]
        assert [unpack(packed) for packed in hasher.pack(prompt, output)] == list(hashes)
        for text, text_hashes in zip((prompt, output), hashes, strict=True):
            digests = [blake2b(unit.encode(), key=salted, digest_size=8).digest() for unit in _PIECE.findall(text)]
            assert text_hashes == [int.from_bytes(digest[:3], "big") for digest in digests]


def test_tool_input_that_is_nested_deeper_than_can_be_written_is_left_out() -> None:
    nested = b'{"a":' * 300 + b"1" + b"}" * 300
    answer = b'{"content": [{"type": "text", "text": "before "}, {"type": "tool_use", "input": %b},' % nested
    answer += b'{"type": "text", "text": "after"}]}'
    assert read_answer(Endpoint.MESSAGES, answer, stream=False).text == "before after"
