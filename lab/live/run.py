"""One run: a trace sent to one endpoint, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from backends.http.client import UpstreamClient
from lab.bench.generator import Generator, Health, HttpSender, InFlightRequest
from lab.bench.prompts import RequestFormat
from lab.bench.record import Record
from lab.bench.run import CONNECT_S
from lab.bench.targets import BaseUrl
from lab.live.requests import CHAT, COMPLETIONS, LiveRequests
from lab.replay.simulate import Replayed

_INTERRUPTED = "interrupted"


class LiveRun:
    """Sends each request when it is due, regardless of the others."""

    def __init__(
        self,
        base: BaseUrl,
        requests: LiveRequests,
        due_s: list[float],
        headers: list[tuple[str, str]],
        timeout_s: float,
        on_end: Callable[[Record], None],
    ) -> None:
        self._requests = requests
        self._due_s = due_s  # send times in seconds after the first request, ascending
        self._client = UpstreamClient(base.address, connect_timeout_s=CONNECT_S, max_idle=100_000)
        self._senders = {
            api: HttpSender(self._client, base.prefix + RequestFormat(api, "").path, headers, timeout_s)
            for api in (CHAT, COMPLETIONS)
        }
        self._generator = Generator(self, requests.body, on_end)

    @property
    def records(self) -> list[Record]:
        """All requests sent."""
        return self._generator.records

    async def run(self) -> Health:
        """Send all requests, and return when all have ended."""
        try:
            return await self._generator.open_loop(self._due_s)
        finally:
            self._client.close()

    def stop(self) -> None:
        """Stop sending and abort the requests in flight."""
        self._generator.stop()

    def post(self, record: Record, body: bytes, on_end: Callable[[InFlightRequest], None]) -> InFlightRequest:
        """Send a request now, to its API."""
        sender = self._senders[self._requests.api(record.index)]
        return sender.post(record, body, on_end, self._requests.headers(record.index))


def failed(record: Record) -> bool:
    """Return whether a request failed by itself, and was not aborted because the run was stopped."""
    return record.error not in {None, _INTERRUPTED}


def replayed(records: Sequence[Record], warmup: int) -> tuple[Replayed, list[str]]:
    """Return the result of the requests after the warm-up, and the names of its backends.

    There are no names if the answers do not name their backend.
    """
    counted = [record for record in records if record.index >= warmup]
    done = sorted((record for record in counted if record.error is None), key=lambda record: record.index)
    named = any(record.backend for record in done)
    names = sorted({record.backend or "unknown" for record in done}) if named else []
    indices = {name: index for index, name in enumerate(names)}
    return Replayed(
        number=np.array([record.index for record in done], np.int64),
        arrived_s=np.array([record.sent_s for record in done])
        - min((record.sent_s for record in records), default=0.0),
        e2e_s=np.array([record.e2e_s for record in done]),
        ttft_s=np.array([record.ttft_s for record in done]),
        tpot_s=np.array([np.nan if record.tpot_s is None else record.tpot_s for record in done]),
        output_tokens=np.array([record.output_tokens for record in done], np.int64),
        backend=np.array([indices[record.backend or "unknown"] for record in done] if named else [], np.int64),
        errors=sum(map(failed, counted)),
        duration_s=max(one.sent_s + one.e2e_s for one in done) - min(one.sent_s for one in done) if done else 0.0,
    ), names
