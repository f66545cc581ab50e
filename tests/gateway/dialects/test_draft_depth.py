"""The depth of drafts that a request's body asks for."""

from __future__ import annotations

import json

import pytest

from gateway.dialects.draft_depth import with_draft_tokens


@pytest.mark.parametrize(
    ("body", "k", "expected"),
    [
        (b' { "model":"m",  "n": 1.0, "seed": 12345678901234567890123456}', 3, {"draft_tokens": 3}),
        (b'{"text": "the vllm_xargs of others"}', 0, {"draft_tokens": 0}),
        (b'{"vllm_xargs": {"session": "a"}, "n": 1}', 1, {"session": "a", "draft_tokens": 1}),
        (b'{"vllm_xargs": {"a": 1}, "vllm_xargs": {"b": 2}}', 2, {"b": 2, "draft_tokens": 2}),
        (b'{"vllm\\u005fxargs": {"draft_tokens": 5}}', 2, {"draft_tokens": 2}),
        (b'{"\\u0076llm_xargs": {"a": "\\u00e9"}}', 2, {"a": "\u00e9", "draft_tokens": 2}),
        (b'{"vllm_xargs": null, "n": 1}', 2, {"draft_tokens": 2}),
        (b" { } ", 2, {"draft_tokens": 2}),
    ],
)
def test_the_depth_stands_in_the_body_once(body: bytes, k: int, expected: dict[str, object]) -> None:
    changed = with_draft_tokens(body, k)
    pairs = json.loads(changed, object_pairs_hook=lambda pairs: pairs)
    assert [dict(value) for name, value in pairs if name == "vllm_xargs"] == [expected]
    others = {name: value for name, value in json.loads(body).items() if name != "vllm_xargs"}
    assert json.loads(changed) == {**others, "vllm_xargs": expected}


def test_what_does_not_ask_is_not_written_anew() -> None:
    body = '{ "model": "m", "text": "\u00e4 \\u00e9", "n": 1.0}'.encode()
    assert with_draft_tokens(body, 3) == b'{"vllm_xargs":{"draft_tokens":3},' + body[1:]


@pytest.mark.parametrize("given", ["[3]", '"a"', "7", "true"])
def test_what_no_engine_takes_is_left_to_the_engine_to_refuse(given: str) -> None:
    body = f'{{"model": "m", "vllm_xargs": {given}}}'.encode()
    assert with_draft_tokens(body, 3) == body
