"""A minimal closed-loop load generator: it stores bytes with their arrival times and parses them at the end."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from backends.http.address import Address
from backends.http.client import Call, UpstreamClient
from backends.http.receiver import HeaderList, UpstreamError
from backends.http.wire import request_head


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


class _Call:
    """A request in flight, which stores what arrives."""

    def __init__(self, loop: _Loop) -> None:
        self.sent_s = time.perf_counter()
        self.pieces: list[tuple[float, bytes]] = []
        self._loop = loop
        self._status = 0

    def on_head(self, status: int, headers: HeaderList) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def on_end(self) -> None:
        if self._status != 200:
            text = b"".join(data for _, data in self.pieces)[:300]
            self._loop.fail(RuntimeError(f"answered {self._status}: {text!r}"))
        else:
            self._loop.on_call_end()

    def on_error(self, error: UpstreamError) -> None:
        self._loop.fail(error)


class _Loop:
    """Keeps `concurrency` requests in flight until all bodies have been sent."""

    def __init__(self, client: UpstreamClient, bodies: Sequence[bytes], concurrency: int) -> None:
        self._client = client
        self._bodies = bodies
        self._in_flight = 0
        self._concurrency = concurrency
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[_Call] = []

    async def play(self) -> None:
        self._refill()
        await self._done

    def on_call_end(self) -> None:
        self._in_flight -= 1
        self._refill()
        if not self._in_flight and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _refill(self) -> None:
        while self._in_flight < self._concurrency and len(self.calls) < len(self._bodies):
            body = self._bodies[len(self.calls)]
            headers = [
                (b"host", self._client.address.authority),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            self.calls.append(call := _Call(self))
            self._in_flight += 1
            self._client.send(Call(request_head(b"POST", b"/v1/completions", headers), body, call))


async def closed_loop(url: str, prompts: Sequence[tuple[str, int]], concurrency: int) -> Played:
    """Send prompts with their output lengths, greedily, `concurrency` at a time.

    Raises
    ------
    UpstreamError, RuntimeError
        If a request fails, since figures from the others would be meaningless.
    """
    client = UpstreamClient(Address.parse(url))
    loop = _Loop(client, [_body(*prompt) for prompt in prompts], concurrency)
    gc.collect()
    gc.disable()
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        await loop.play()
        duration_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    finally:
        gc.enable()
        client.close()
    return Played(duration_s, cpu_s / duration_s, [_read(call, begin_s) for call in loop.calls])


def _body(prompt: str, output_tokens: int) -> bytes:
    return orjson.dumps(
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
