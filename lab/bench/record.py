"""One request as it went: when it was sent, when its chunks came, and what the engine said of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.http.usage import Usage, read_usage

_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculation, counted: of one request, or of many.

    Parameters
    ----------
    steps
        Engine steps that drafted.
    accepted_at
        Steps that accepted the draft at each position, shape (k,); never rises.
    """

    steps: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_at: tuple[int, ...] = ()


@dataclass(slots=True)
class Record:
    """One request.

    Parameters
    ----------
    index
        Its place in the workload; the same number is the same prompt for every target.
    due_s, sent_s, ended_s
        When it should have been sent, when it was, and when its answer ended or failed; `time.perf_counter`.
    chunks_s
        When each chunk with output arrived; one chunk is one engine step.
    error
        Kind of failure, such as `connect` or `http 400`; None if it went well.
    backend
        Which replica served it, if a gateway said so in `x-gateway-backend`.
    """

    index: int
    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunks_s: array[float] = field(default_factory=lambda: array("d"))
    usage: Usage | None = None
    drafting: Drafting | None = None
    error: str | None = None
    detail: str = ""
    backend: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; its chunks, where the engine gave no usage."""
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
        """Note why it failed; the first reason stays."""
        if self.error is None:
            self.error, self.detail = kind, " ".join(detail.split())[:_DETAIL_CHARACTERS]


class AnswerReader:
    """Reads a streamed answer as it arrives, noting when.

    A chunk counts if it has `choices`, as in `vllm bench serve`, but for the one that only names the role: vLLM sends
    it together with the first token, others long before.
    """

    __slots__ = ("_held", "_record", "finished")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._held = b""
        self.finished = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that arrived at `now_s`."""
        if self._held:
            data, self._held = self._held + data, b""
        lines = data.split(b"\n")
        self._held = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def close(self) -> None:
        """Know that the answer has ended, and judge it."""
        if self._held.startswith(b"data:"):
            self._event(self._held[5:].strip(), self._record.chunks_s[-1] if self._record.chunks_s else 0.0)
        if not self._record.chunks_s:
            self._record.fail("empty", "the answer held no chunk with output")
        elif not self.finished:
            self._record.fail("cut off", "the stream ended without a finish_reason and without [DONE]")

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._record.fail("garbage", f"an event is no JSON: {payload[:100]!r}")
            return
        if not isinstance(document, dict):
            self._record.fail("garbage", f"an event is no object: {payload[:100]!r}")
            return
        choices = document.get("choices")
        if choices:
            choice = choices[0]
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
            self._record.drafting = read_drafting(document)


def error_message(body: bytes) -> str:
    """Return what an error in OpenAI's form says, or what came instead."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode(errors="replace")


def read_drafting(document: Mapping[str, Any]) -> Drafting | None:
    """Read `metrics.speculative_decoding` of an answer or its last chunk; None if it has none, or not of this form."""
    metrics = document.get("metrics")
    told = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if not isinstance(told, Mapping):
        return None
    counts = [told.get(name) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        return None
    histogram = told.get("acceptance_histogram")
    return Drafting(counts[0] or 0, counts[1] or 0, counts[2] or 0, _by_position(histogram))


def _by_position(histogram: object) -> tuple[int, ...]:
    """Turn counts of steps by tokens accepted, shape (k + 1,), into counts of acceptances by position, shape (k,)."""
    if not isinstance(histogram, Sequence) or not all(isinstance(count, int) for count in histogram):
        return ()
    return tuple(sum(histogram[position + 1 :]) for position in range(len(histogram) - 1))


def _only_names_role(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    return isinstance(delta, Mapping) and "role" in delta and not any(v for name, v in delta.items() if name != "role")
