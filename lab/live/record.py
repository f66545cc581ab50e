"""The record of one request: when it was sent, when its chunks arrived, and what the engine reported."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.dialects.transcript import dicts
from gateway.dialects.usage import Usage, read_usage

_DETAIL_CHARACTERS = 300


@dataclass(slots=True)
class Record:
    """One request.

    Examples
    --------
    >>> record = Record(0, due_s=0.0, sent_s=1.0, chunks_s=array("d", [1.5, 2.0, 2.5]))
    >>> record.ttft_s, record.e2e_s, record.output_tokens, record.tpot_s
    (0.5, 1.5, 3, 0.5)
    """

    index: int  # in the workload; an index has the same prompt for every target
    # due_s, sent_s, ended_s: when it was due, was sent, and ended or failed, by `time.perf_counter`.
    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    # Arrival time of each chunk with output; one chunk is one engine step.
    chunks_s: array[float] = field(default_factory=lambda: array("d"))
    usage: Usage | None = None
    error: str | None = None  # kind of failure, such as `connect` or `http 400`; None for success
    detail: str = ""  # message of the failure
    backend: str = ""  # replica that served it, by `x-gateway-backend`; empty without a gateway

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; the number of chunks if the engine reported no usage."""
        counted = self.usage.output_tokens if self.usage is not None else None
        return len(self.chunks_s) if counted is None else counted

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk with output."""
        return self.chunks_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last chunk with output."""
        return self.chunks_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        tokens = self.output_tokens
        return (self.e2e_s - self.ttft_s) / (tokens - 1) if tokens > 1 else None

    def fail(self, kind: str, detail: str = "") -> None:
        """Record why the request failed; only the first reason is kept."""
        if self.error is None:
            self.error, self.detail = kind, " ".join(detail.split())[:_DETAIL_CHARACTERS]


class AnswerReader:
    r"""Reads a streamed answer and records the arrival of its chunks.

    Chunks with `choices` count, as in `vllm bench serve`, except one that only names the role: vLLM sends it with the
    first token, other engines long before.

    Examples
    --------
    >>> record = Record(0, due_s=0.0)
    >>> reader = AnswerReader(record)
    >>> reader.feed(b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}', now_s=2.0)
    >>> reader.feed(b"\n\ndata: [DONE]\n\n", now_s=2.5)
    >>> reader.close()
    >>> record.error, list(record.chunks_s)
    (None, [2.5])
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._held = b""
        self.finished = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Read bytes that arrived at `now_s`."""
        if self._held:
            data, self._held = self._held + data, b""
        lines = data.split(b"\n")
        self._held = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def close(self) -> None:
        """Handle the end of the answer: record a failure if it is empty or incomplete."""
        if self._held.startswith(b"data:"):
            self._event(self._held[5:].strip(), self._record.chunks_s[-1] if self._record.chunks_s else 0.0)
        if not self._record.chunks_s:
            self._record.fail("empty", "the answer has no chunk with output")
        elif not self.finished:
            self._record.fail("cut off", "the stream ended without a finish_reason and without [DONE]")

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._record.fail("garbage", f"an event is not JSON: {payload[:100]!r}")
            return
        if not isinstance(document, dict):
            self._record.fail("garbage", f"an event is not an object: {payload[:100]!r}")
            return
        for choice in dicts(document.get("choices"))[:1]:
            if choice.get("finish_reason"):
                self.finished = True
            elif not self._record.chunks_s and _only_names_role(choice):
                return
            self._record.chunks_s.append(now_s)
        if document.get("error"):
            error = document["error"]
            code = error.get("code") if isinstance(error, Mapping) else None
            message = error.get("message", "") if isinstance(error, Mapping) else error
            self._record.fail(f"engine error {code}" if code else "engine error", str(message))
        if document.get("usage"):
            self._record.usage = read_usage(document)


def error_message(body: bytes) -> str:
    """Return the message of an error in OpenAI's format; in any other format, the body.

    Examples
    --------
    >>> error_message(b'{"error": {"message": "too long"}}'), error_message(b"<html>")
    ('too long', '<html>')
    """
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode(errors="replace")


def _only_names_role(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    return isinstance(delta, Mapping) and "role" in delta and not any(v for name, v in delta.items() if name != "role")
