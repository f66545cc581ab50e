"""Steady mixed load on one address, at a fixed rate whatever comes back, and what became of each request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from benchmarks.faults.answers import Answer, DocumentAnswer, StreamedAnswer
from benchmarks.faults.asking import MODEL, Work
from benchmarks.load import steady

ANSWERED, LEFT = "answered", "left"
REFUSED, UNANSWERED, CUT, HUNG = "refused", "no answer", "cut", "hung"
INCOMPLETE, WRONG = "incomplete", "wrong"
SILENT = frozenset({INCOMPLETE, WRONG})
"""Failures that look like an answer."""
PATIENCE_S = 60.0
"""Seconds without a byte after which the client gives up."""
_SLOW_PAUSE_S = 0.02
_SLOW_BUFFER_BYTES = 1 << 16
_READ_BYTES = 1 << 16
numbers = count(1)
"""Numbers of requests, each used once in a process."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and how its client behaves.

    Parameters
    ----------
    leaves_after_s
        Seconds from the end of the request until the client leaves; infinite if it stays.
    is_slow
        Whether the client reads slowly.
    """

    work: Work
    prompt_bytes: int = 0
    leaves_after_s: float = float("inf")
    is_slow: bool = False

    @property
    def path(self) -> str:
        """Return the path."""
        return "/v1/chat/completions" if self.work.is_chat else "/v1/completions"

    def document(self) -> dict[str, Any]:
        """Return the body."""
        work = self.work
        text = work.prompt(self.prompt_bytes)
        body: dict[str, Any] = {"model": MODEL, "max_tokens": work.tokens, "temperature": 0.0}
        body |= {"messages": [{"role": "user", "content": text}]} if work.is_chat else {"prompt": text}
        return body | ({"stream": True} if work.is_stream else {})


def mixed(seed: int) -> Iterator[Ask]:
    """Yield requests without end: chats and completions, streams and documents, short and long.

    One of 20 has a prompt of 200 KB, one of 20 a stream of three seconds, one of 25 a slow client, and one of 25 a
    client that leaves.
    """
    rng = random.Random(seed)
    for number in numbers:
        is_chat, is_stream = rng.random() < 0.75, rng.random() < 0.5
        tokens, draw = rng.randint(5, 40), rng.random()
        if draw < 0.05:
            yield Ask(Work(number, 300, 0, is_chat, is_stream=True))
        elif draw < 0.09:
            yield Ask(Work(number, 30, 0, is_chat, is_stream=True, padding_bytes=1 << 16), is_slow=True)
        elif draw < 0.13:
            yield Ask(Work(number, 20 + tokens, 0, is_chat, is_stream), leaves_after_s=rng.uniform(0.1, 0.3))
        else:
            prompt_bytes = 200_000 if draw < 0.18 else 1000
            yield Ask(Work(number, tokens, 0, is_chat, is_stream), prompt_bytes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    Parameters
    ----------
    what
        `answered`, `left`, or how it failed: `status 502`, `error event`, or one of this module's constants.
    detail
        The error, for failures.
    """

    ask: Ask
    what: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Return whether the client wanted the answer and did not get it."""
        return self.what not in (ANSWERED, LEFT)


@dataclass
class Tally:
    """The outcomes of a load."""

    outcomes: list[Outcome] = field(default_factory=list)

    def count(self, *what: str) -> int:
        """Return the number of requests with one of these outcomes."""
        return sum(outcome.what in what for outcome in self.outcomes)

    def failures(self) -> Counter[str]:
        """Return the failed requests by reason."""
        return Counter(outcome.what for outcome in self.outcomes if outcome.failed)

    def examples(self) -> dict[str, str]:
        """Return the error of one request of each reason."""
        return {outcome.what: outcome.detail for outcome in self.outcomes if outcome.failed and outcome.detail}


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do some work while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Load:
    """Sends requests, each on a connection of its own, so that none fails for the one before.

    Parameters
    ----------
    port
        Port on loopback.

    Attributes
    ----------
    lag_s
        The longest time by which a request was sent too late, for want of a processor.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        timeout, once = httpx.Timeout(PATIENCE_S), httpx.Limits(max_keepalive_connections=0)
        slow = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)]
        self._client, self._slow_client = (
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(verify=False, socket_options=options, limits=once),
                timeout=timeout,
            )
            for options in (None, slow)
        )
        self.tally = Tally()
        self.pending: set[asyncio.Task[Outcome]] = set()
        self.sent = 0
        self.lag_s = 0.0

    def send(self, ask: Ask) -> asyncio.Task[Outcome]:
        """Send a request in the background."""
        task = asyncio.get_running_loop().create_task(self._send(ask))
        self.pending.add(task)
        task.add_done_callback(self._ended)
        self.sent += 1
        return task

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            self.tally.outcomes.append(task.result())

    def steady(self, asks: Iterable[Ask], rate_per_s: float) -> AbstractAsyncContextManager[None]:
        """Send requests at a rate while the block runs."""
        return meanwhile(self.send_all(asks, rate_per_s))

    async def send_all(self, asks: Iterable[Ask], rate_per_s: float) -> None:
        """Send requests at a rate."""
        waiting = iter(asks)
        async for late_s in steady(rate_per_s):
            if (ask := next(waiting, None)) is None:
                return
            self.lag_s = max(self.lag_s, late_s)
            self.send(ask)

    async def finish(self) -> Tally:
        """Wait for what was sent, and return the outcomes."""
        while self.pending:
            await asyncio.wait(self.pending)
        await self._client.aclose()
        await self._slow_client.aclose()
        return self.tally

    async def _send(self, ask: Ask) -> Outcome:
        try:
            async with asyncio.timeout(None) as leaving:
                return Outcome(ask, *await self._exchange(ask, leaving))
        except TimeoutError:
            assert leaving.expired()
            return Outcome(ask, LEFT)

    async def _exchange(self, ask: Ask, leaving: asyncio.Timeout) -> tuple[str, str]:
        async def trace(event: str, _info: object) -> None:
            if event == "http11.send_request_body.complete" and ask.leaves_after_s < float("inf"):
                leaving.reschedule(asyncio.get_running_loop().time() + ask.leaves_after_s)

        answer: Answer | None = None
        client = self._slow_client if ask.is_slow else self._client
        try:
            async with client.stream(
                "POST", self._url + ask.path, json=ask.document(), extensions={"trace": trace}
            ) as response:
                answer = StreamedAnswer(ask.work) if ask.work.is_stream else DocumentAnswer(ask.work)
                answer.status = response.status_code
                async for data in response.aiter_bytes(_READ_BYTES if ask.is_slow else None):
                    answer.feed(data)
                    if ask.is_slow:
                        await asyncio.sleep(_SLOW_PAUSE_S)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                return REFUSED, repr(error)
            if isinstance(error, httpx.TimeoutException):
                return HUNG, repr(error)
            if answer is None:
                return UNANSWERED, repr(error)
            return answer.verdict_if_cut(), repr(error)
        return answer.verdict()
