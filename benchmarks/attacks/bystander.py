"""A client with a valid key, a request each 50 ms, until its input ends: `python -m benchmarks.attacks.bystander PORT`.

It prints a line once the first request is answered and, at the end, the seconds of each request and the lost ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time

import httpx

from benchmarks.load import steady
from benchmarks.overhead.systems import KEY

RATE_PER_S = 20.0
LOST_S = 10.0
"""Seconds after which a request counts as lost."""


class Bystander:
    """What became of the requests so far."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.waits_s: list[float] = []
        self.lost: dict[str, int] = {}

    async def ask(self, client: httpx.AsyncClient) -> None:
        """Send one request; a kept connection that the server has closed meanwhile is no loss."""
        began_s = time.monotonic()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        try:
            answer = await client.post(self._url, json=body)
            outcome = "" if answer.status_code == 200 else str(answer.status_code)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        if outcome:
            self.lost[outcome] = self.lost.get(outcome, 0) + 1
        self.waits_s.append(time.monotonic() - began_s)

    async def run(self) -> None:
        """Send requests until the input ends, and wait for the last answers."""
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        limits = httpx.Limits(max_connections=500, keepalive_expiry=1.0)
        headers = {"authorization": f"Bearer {KEY}"}
        transport = httpx.AsyncHTTPTransport(limits=limits, retries=1)
        async with httpx.AsyncClient(transport=transport, headers=headers, timeout=LOST_S) as client:
            await self.ask(client)
            self.waits_s.clear()
            self.lost.clear()
            print("ready", flush=True)
            tasks: set[asyncio.Task[None]] = set()
            async for _ in steady(RATE_PER_S):
                if ended.done():
                    break
                task = asyncio.create_task(self.ask(client))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)


async def _main(port: int) -> None:
    bystander = Bystander(port)
    await bystander.run()
    print(json.dumps({"waits_s": bystander.waits_s, "lost": bystander.lost}))


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the attacker must not take its processor
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    asyncio.run(_main(int(sys.argv[1])))
