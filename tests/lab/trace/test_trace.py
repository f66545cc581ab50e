"""The record: what is written, and what is read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import orjson
import pytest

from gateway.rooms.recorder.schema import Hashing
from lab.trace.decode import decode, encode
from lab.trace.record import SpeculationRecord, TraceRecord

LIKE = {"str": "chat", "int": 3, "int | None": 3, "float | None": 0.25, "bool | None": True}
PLAIN: dict[str, Any] = {each.name: LIKE[str(each.type)] for each in fields(TraceRecord) if each.type in LIKE}
FULL = TraceRecord(
    **PLAIN,
    baseline_only=("min_p",),
    candidates={"backend": ["a", "b"], "prediction_s": [2.5, None], "propensity": [0.1, 0.9]},
    itl=[0.02, 0.03],
    spec=SpeculationRecord(8, 3, 2, 2.5),
    acceptance={"ngram": [1, 2, 1, 2, 1], "eagle3": 2.25},
    prompt_token_ids=[1, 2, 3],
    output_token_ids=[4, 5],
    messages=[{"role": "user", "content": "say"}],
    prompt_hashes=[7],
    output_hashes=[8, 9],
    hashing=Hashing("piece", 2, "00ff00ff"),
    prefix_blocks=[11, 12],
)


def test_every_field_survives_writing_and_reading() -> None:
    defaults = TraceRecord()
    assert all(getattr(FULL, name) != getattr(defaults, name) for name in FULL.__slots__)
    assert decode(orjson.loads(encode(FULL)), 1) == FULL


def test_means_are_written_by_their_name() -> None:
    written = orjson.loads(encode(FULL))
    assert written["version"] == 3
    assert written["acceptance"] == {"ngram": [1, 2, 1, 2, 1], "eagle3": {"mean_acceptance_length": 2.25}}


def test_missing_and_unknown_keys_are_ignored() -> None:
    document = {
        "arrived_at": 3,
        "prompt_tokens": 9,
        "output_tokens": 4,
        "temperature": 0.7,
        "acceptance": {"ngram": [1]},
    }
    record = decode({**document, "model": None, "of_another_version": {"x": [1]}}, 17)
    assert record == TraceRecord(
        id="17", arrived_at=3.0, prompt_tokens=9, output_tokens=4, temperature=0.7, acceptance={"ngram": [1]}
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "neither prompt_tokens nor a prompt"),
        ({"prompt_tokens": -1}, "prompt_tokens: expected a whole number"),
        ({"prompt_tokens": 1.5}, "prompt_tokens: expected a whole number"),
        ({"prompt_tokens": True}, "prompt_tokens: expected a number, not true or false"),
        ({"prompt_tokens": 1, "temperature": "hot"}, "temperature: expected a number, not a text"),
        ({"prompt_tokens": 1, "propensity": 1.5}, "propensity: expected 0 to 1"),
        ({"prompt_tokens": 1, "arrived_at": "yesterday"}, "arrived_at: expected seconds or an ISO 8601 time"),
        ({"prompt_tokens": 1, "output_token_ids": ["a"]}, "output_token_ids: expected a list of whole numbers"),
        ({"prompt_tokens": 1, "acceptance": {"ngram": "x"}}, "acceptance: ngram: expected a number"),
        ({"prompt_tokens": 1, "candidates": 2}, "candidates: expected an object"),
        ({"prompt_tokens": 1, "version": 99}, "version 99 of the schema; this reader supports version 3"),
        ({"prompt_tokens": 1, "version": 2}, "version 2 of the schema"),
    ],
)
def test_invalid_records_are_rejected(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(fields, 1)


def test_missing_lengths_come_from_ids_and_texts() -> None:
    assert decode({"prompt_token_ids": [1, 2, 3], "output_token_ids": [4]}, 1).output_tokens == 1
    assert decode({"prompt": [5, 6], "output": "x" * 40}, 1).prompt_token_ids == [5, 6]
    text = decode({"prompt": "x" * 400, "output": "é" * 20}, 1)
    assert (text.prompt_tokens, text.output_tokens) == (105, 10)
    chat = decode({"messages": [{"role": "user", "content": "x" * 40}]}, 1)
    assert (chat.prompt_tokens, chat.output_tokens) == (15, None)


def test_a_step_emits_at_least_one_token() -> None:
    assert decode({"prompt_tokens": 1, "acceptance": {"NGRAM": [0, 3, 1.0]}}, 1).acceptance == {"ngram": [1, 3, 1]}


def test_the_text_for_drafting_is_ids_or_hashes() -> None:
    assert FULL.text is not None
    assert FULL.text.exact
    hashed = TraceRecord(prompt_hashes=[1], output_hashes=[2], hashing=Hashing("token", 2))
    assert hashed.text is not None
    assert not hashed.text.exact
    assert TraceRecord(prompt="only text").text is None


def test_hashes_are_packed_or_numbers() -> None:
    packed = encode(TraceRecord(prompt_hashes=[1, 2**24 - 1], output_hashes=[2**24]))
    assert b'"prompt_hashes":"AAAB////"' in packed
    assert b'"output_hashes":[16777216]' in packed
    read_again = decode(orjson.loads(packed), 1)
    assert (read_again.prompt_hashes, read_again.output_hashes) == ([1, 2**24 - 1], [2**24])
    for wrong in ("AAAB///", "AQ==", "ä"):
        with pytest.raises(ValueError, match="prompt_hashes: expected hashes"):
            decode({"prompt_tokens": 1, "prompt_hashes": wrong}, 1)
