"""A closed loop on a real engine: it stores bytes with their arrival times and parses them at the end."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from benchmarks import load

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


@dataclass(slots=True)
class Answer:
    """One answered request; times in seconds from the start of its cell.

    Parameters
    ----------
    chunks_s, chunk_tokens
        Arrival time and number of tokens of each chunk; a chunk is one step of the engine.
    drafted, accepted_at
        Draft tokens verified, and the number of steps that accepted each draft position.
    """

    sent_s: float
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    draft_steps: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Played:
    """A finished closed loop; `cpu_share` is the generator's CPU time in shares of one core."""

    duration_s: float
    cpu_share: float
    answers: list[Answer]


class _Call(load.Call):
    """A request in flight, which stores what arrives."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.pieces: list[tuple[float, bytes]] = []

    def on_body(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))

    def on_end(self, status: int) -> None:
        if status != 200:
            raise RuntimeError(f"answered {status}: {b''.join(data for _, data in self.pieces)[:300]!r}")


async def closed_loop(url: str, prompts: Sequence[tuple[str, int]], concurrency: int) -> Played:
    """Send prompts with their output lengths, greedily, `concurrency` at a time.

    Raises
    ------
    OSError, RuntimeError
        If a request fails, since figures from the others would be meaningless.
    """
    port, calls = urlsplit(url).port, [_Call(_request(*prompt)) for prompt in prompts]
    assert port is not None
    gc.collect()
    gc.disable()
    begin_s, cpu_s = time.monotonic(), time.process_time()
    opened = await load.closed_loop(port, iter(calls), concurrency)
    try:
        await asyncio.gather(*(each.ended for each in opened))
        duration_s, cpu_s = time.monotonic() - begin_s, time.process_time() - cpu_s
    finally:
        gc.enable()
        for connection in opened:
            connection.close()
    return Played(duration_s, cpu_s / duration_s, [_read(call, begin_s) for call in calls])


def _request(prompt: str, output_tokens: int) -> bytes:
    body = orjson.dumps(
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    )
    return _HEAD % (len(body), body)


def _read(call: _Call, begin_s: float) -> Answer:
    answer = Answer(call.sent_s - begin_s)
    held = b""
    for at_s, data in call.pieces:
        *events, held = (held + data).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                _add_event(answer, orjson.loads(event.removeprefix(b"data: ")), at_s - begin_s)
    return answer


def _add_event(answer: Answer, document: dict[str, Any], at_s: float) -> None:
    for choice in document["choices"]:
        answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
        if ids := choice.get("token_ids"):
            answer.output_ids += ids
            answer.chunks_s.append(at_s)
            answer.chunk_tokens.append(len(ids))
    speculation = (document.get("metrics") or {}).get("speculative_decoding")
    if speculation:
        histogram = speculation["acceptance_histogram"]
        answer.draft_steps, answer.drafted = speculation["num_spec_steps"], speculation["num_draft_tokens"]
        answer.accepted_at = [sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
