"""Measure what a greedy client costs another one: `python -m benchmarks.shares`.

Real time: two simulated replicas of Llama-3.1-70B on four H100 each, `learned`, at most 8 requests in flight at each,
the others wait in the gateway. A polite client sends requests (Poisson, prompts of 300 tokens, answers of 48), the same
in each run. A greedy one attacks: it sends at once whatever waits. Each attack is played with two keys, which get their
shares, and with one key for both, which are served as they come. `alone` is what the polite client sees with its share
for itself: one of the two replicas. Prints mean and 95th percentile of its seconds to the last token, over `alone`, and
the requests of the greedy client that ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from backends.launch.ports import free_port
from benchmarks.process import LOAD_CPU, SYSTEM_CPU, running
from benchmarks.table import head, row

MODEL, WARM_S = "llama-3.1-70b", 8.0
POOL = """\
server: {host: 127.0.0.1, port: %d}
models:
  %s:
    policy: {name: learned}
    queue: {max_in_flight_per_backend: 8, max_waiting: 5000, max_wait_s: 600}
    backends: {%s}
keys:
  - {name: polite, key: sk-polite}
  - {name: greedy, key: sk-greedy}
state: none
"""
REPLICA = "{method: baseline, simulate: {calibration: llama-3.1-70b-4xh100}}"
SERVED = {"by shares": "sk-greedy", "as they come": "sk-polite"}
"""The greedy client's key."""
ATTACKS = {  # clients at once, words of the prompt, tokens of the answer, seconds until it hangs up
    "alone": (0, 0, 0, None),
    "200 at once": (200, 300, 48, None),
    "long prompts": (40, 6000, 48, None),
    "long answers": (40, 300, 1000, None),
    "aborts": (100, 2000, 200, 1.0),
}


def body(text: str, words: int, tokens: int) -> dict[str, Any]:
    """Return a request with a prompt of its own."""
    content = f"{text}: {' '.join(random.Random(text).choices(('red', 'green', 'house', 'river', 'seven'), k=words))}"
    asked = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    return asked | {"max_tokens": tokens, "ignore_eos": True, "stream": True}


async def ask(client: httpx.AsyncClient, key: str, request: dict[str, Any]) -> float:
    """Send a request; return the seconds to the end of its stream."""
    began_s = time.monotonic()
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/chat/completions", json=request, headers=headers) as answer:
        async for _ in answer.raise_for_status().aiter_bytes():
            pass
    return time.monotonic() - began_s


async def attack(client: httpx.AsyncClient, key: str, name: str, number: int, ended: list[float]) -> None:
    """Send one request after the other, not in step with others: the simulated engines read prompts one by one."""
    _, words, tokens, hangs_up_s = ATTACKS[name]
    await asyncio.sleep(number / ATTACKS[name][0])
    while True:
        number += 1000
        try:
            async with asyncio.timeout(hangs_up_s):
                ended.append(await ask(client, key, body(f"greedy {number}", words, tokens)))
        except (TimeoutError, httpx.HTTPError):
            continue


async def measure(port: int, name: str, key: str, options: argparse.Namespace) -> tuple[list[float], int]:
    """Return the seconds of the polite client's requests, and how many of the greedy one ended beside them."""
    limits, polite = httpx.Limits(max_connections=None), "sk-polite"
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/readyz")).status_code == 200:
                    break
            await asyncio.sleep(0.5)
        await asyncio.gather(*(ask(client, polite, body(f"polite warm {n}", 300, 48)) for n in range(16)))
        ended = list[float]()
        attacking = [asyncio.create_task(attack(client, key, name, n, ended)) for n in range(ATTACKS[name][0])]
        await asyncio.sleep(WARM_S if attacking else 0.0)
        ended.clear()
        draws, asking = random.Random(1), list[asyncio.Task[float]]()
        end_s = time.monotonic() + options.seconds
        while time.monotonic() < end_s:
            await asyncio.sleep(draws.expovariate(options.rate))
            request = body(f"polite {len(asking)}", 300, 48)
            asking.append(asyncio.create_task(ask(client, polite, request)))
        seconds = await asyncio.gather(*asking)
        others = len(ended)
        for each in attacking:
            each.cancel()
        await asyncio.gather(*attacking, return_exceptions=True)
        return list(seconds), others


def main() -> None:
    """Print a row for each attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--only", nargs="*", choices=SERVED, default=[*SERVED])
    parser.add_argument("--attack", nargs="*", choices=ATTACKS, default=[*ATTACKS])
    options, alone = parser.parse_args(), np.ones(2)
    print(head("attack", "served", "requests", "mean s", "P95 s", "mean / alone", "P95 / alone", "greedy"))
    for name in ["alone", *(each for each in options.attack if each != "alone")]:
        is_alone = name == "alone"
        for how in ["by shares"] if is_alone else options.only:
            with tempfile.TemporaryDirectory() as folder:
                port, pool = free_port(), Path(folder, "pool.yaml")
                names = [f"r{number}: {REPLICA}" for number in range(1 if is_alone else 2)]
                pool.write_text(POOL % (port, MODEL, ", ".join(names)))
                argv = [sys.executable, "-m", "gateway", "--config", str(pool)]
                with running(argv, {SYSTEM_CPU, LOAD_CPU}, Path(folder, "log")):
                    seconds, others = asyncio.run(measure(port, name, SERVED[how], options))
            figures = np.array([np.mean(seconds), np.quantile(seconds, 0.95)])
            alone = figures if is_alone else alone
            cells = [f"{value:.2f}" for value in (*figures, *(figures / alone))]
            print(row(name, how, len(seconds), *cells, others), flush=True)


if __name__ == "__main__":
    main()
