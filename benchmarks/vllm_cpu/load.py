"""A closed loop that costs next to nothing: bytes are kept with the time they came, and read when all is over."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from backends.http.client import Address, HeaderList, UpstreamClient, UpstreamError, request_head


@dataclass(slots=True)
class Answer:
    """One request as it went; times in seconds from the beginning of its cell.

    Parameters
    ----------
    chunks_s, chunk_tokens
        When each chunk came and how many tokens it brought: one chunk is one step of the engine.
    drafted, accepted_at
        Draft tokens verified, and steps that accepted the draft at each position; of all steps that drafted.
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
    """A closed loop that has ended; `cpu_share` is the generator's, of one core."""

    duration_s: float
    cpu_share: float
    answers: list[Answer]


class _Flight:
    """Keeps what arrives."""

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
            self._loop.ended()

    def on_error(self, error: UpstreamError) -> None:
        self._loop.fail(error)


class _Loop:
    """`concurrency` requests under way until all bodies were sent."""

    def __init__(self, client: UpstreamClient, bodies: Sequence[bytes], concurrency: int) -> None:
        self._client = client
        self._bodies = bodies
        self._under_way = 0
        self._concurrency = concurrency
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.flights: list[_Flight] = []

    async def play(self) -> None:
        self._refill()
        await self._done

    def ended(self) -> None:
        self._under_way -= 1
        self._refill()
        if not self._under_way and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _refill(self) -> None:
        while self._under_way < self._concurrency and len(self.flights) < len(self._bodies):
            body = self._bodies[len(self.flights)]
            headers = [
                (b"host", self._client.address.authority),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            self.flights.append(flight := _Flight(self))
            self._under_way += 1
            self._client.send(request_head(b"POST", b"/v1/completions", headers), body, flight)


async def closed_loop(url: str, prompts: Sequence[tuple[str, int]], concurrency: int) -> Played:
    """Send prompts, each with the length of its answer, greedily, `concurrency` at a time.

    Raises
    ------
    UpstreamError, RuntimeError
        If a request fails; a figure from the others would mean nothing.
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
    return Played(duration_s, cpu_s / duration_s, [_read(flight, begin_s) for flight in loop.flights])


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


def _read(flight: _Flight, begin_s: float) -> Answer:
    answer = Answer(flight.sent_s - begin_s)
    held = b""
    for at_s, data in flight.pieces:
        *events, held = (held + data).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                _take(answer, orjson.loads(event.removeprefix(b"data: ")), at_s - begin_s)
    return answer


def _take(answer: Answer, document: dict[str, Any], at_s: float) -> None:
    for choice in document["choices"]:
        answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
        if ids := choice.get("token_ids"):
            answer.output_ids += ids
            answer.chunks_s.append(at_s)
            answer.chunk_tokens.append(len(ids))
    told = (document.get("metrics") or {}).get("speculative_decoding")
    if told:
        histogram = told["acceptance_histogram"]
        answer.draft_steps, answer.drafted = told["num_spec_steps"], told["num_draft_tokens"]
        answer.accepted_at = [sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
