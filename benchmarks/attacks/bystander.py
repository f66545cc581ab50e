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
from collections import Counter

import httpx

from benchmarks.load import steady
from benchmarks.overhead.systems import KEY

ASKED = {"role": "user", "content": "hi"}
RATE_PER_S = 20.0
LOST_S = 10.0
"""Seconds after which a request counts as lost."""


async def watch(port: int) -> None:
    """Send requests until the input ends, wait for the last answers, and print what became of them."""
    url, body = f"http://127.0.0.1:{port}/v1/chat/completions", {"model": "m", "messages": [ASKED]}
    waits_s, lost = list[float](), Counter[str]()

    async def ask() -> None:
        began_s = time.monotonic()
        try:
            answer = await client.post(url, json=body)
            outcome = "" if answer.status_code == 200 else str(answer.status_code)
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        if outcome:
            lost[outcome] += 1
        waits_s.append(time.monotonic() - began_s)

    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    limits = httpx.Limits(max_connections=500, keepalive_expiry=1.0)
    # A kept connection that the server has closed meanwhile is no loss.
    transport = httpx.AsyncHTTPTransport(limits=limits, retries=1)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, headers=headers, timeout=LOST_S) as client:
        await ask()
        waits_s.clear()
        lost.clear()
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            async for _ in steady(RATE_PER_S):
                if ended.done():
                    break
                tasks.create_task(ask())
    print(json.dumps({"waits_s": waits_s, "lost": lost}))


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the attacker must not take its processor
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    asyncio.run(watch(int(sys.argv[1])))
