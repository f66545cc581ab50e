"""Parts common to the answers of all APIs: identity, server-sent events, log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from backends.simulator.server.answer import Answer
from backends.simulator.text.model import TargetModel

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The identity of an answer."""

    id: str  # id with its prefix, `chatcmpl-...`
    created: int
    model: str  # model name that the client used
    fingerprint: str
    num_speculative_tokens: int = 0  # k of the replica; 0 for a baseline

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the first fields of each object of the answer."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(value: Any, name: str | None = None) -> bytes:
    r"""Return a server-sent event.

    Examples
    --------
    >>> event({"done": True}, "message_stop")
    b'event: message_stop\ndata: {"done":true}\n\n'
    """
    data = b"data: %b\n\n" % orjson.dumps(value)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


def spaced_event(value: Any) -> bytes:
    """Return a server-sent event in the format of vLLM's errors, with spaces after commas and colons."""
    import json

    return f"data: {json.dumps(value)}\n\n".encode()


def alternatives(model: TargetModel, answer: Answer, position: int, limit: int) -> list[tuple[int, float]]:
    """Return the most likely tokens at a position with their log probabilities, the chosen one included, best first."""
    chosen, confidence = answer.ids[position], answer.confidence[position]
    if limit < 1:
        return [(chosen, math.log(confidence))]
    before = answer.ids[max(0, position - 3) : position] or answer.prompt_ids[-3:]
    candidates = model.alternatives(before, answer.kind, limit + 1)
    left = 1.0 - confidence
    rated = [(token, math.log(max(1e-9, left * share))) for token, share in candidates if token != chosen][:limit]
    rated.append((chosen, math.log(confidence)))
    rated.sort(key=lambda each: -each[1])
    if len(rated) > limit and rated[-1][0] != chosen:
        rated.pop()
    return rated


def chat_logprobs(model: TargetModel, answer: Answer, start: int, end: int, top: int) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice for its tokens from `start` to `end`."""
    content = []
    for position in range(start, end):
        rated = alternatives(model, answer, position, top)
        entries = [_entry(model, token, logprob) for token, logprob in rated]
        chosen = next(entry for entry, (token, _) in zip(entries, rated, strict=True) if token == answer.ids[position])
        content.append({**chosen, "top_logprobs": entries[:top]})
    return {"content": content}


def _entry(model: TargetModel, token: int, logprob: float) -> dict[str, Any]:
    text = model.tokenizer.string(token)
    raw = model.tokenizer.bytes_of(token) or text.encode()
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(
    model: TargetModel, answer: Answer, start: int, end: int, top: int, offset: int
) -> dict[str, Any]:
    """Return the `logprobs` of a completion choice for its tokens from `start` to `end`."""
    offsets, logprobs, tokens, tops = [], [], [], []
    strings: Sequence[str]
    for position in range(start, end):
        rated = dict(alternatives(model, answer, position, top))
        token = answer.ids[position]
        offsets.append(offset)
        tokens.append(model.tokenizer.string(token))
        logprobs.append(rated[token])
        strings = [model.tokenizer.string(other) for other in rated]
        tops.append(dict(zip(strings, rated.values(), strict=True)))
        offset = offset + len(tokens[-1])
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}
