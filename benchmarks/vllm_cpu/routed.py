"""Policies in turns on real engines: the same four replicas, one gateway a policy before them, one load after another.

What a policy learns it learns in its own turns. The engines share the machine's cores, so that each slows all others
too, which no policy knows; on a GPU a replica they would not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import httpx
import orjson
from scipy.stats import t as student

from backends.http.client import Address, HeaderList, UpstreamClient, UpstreamError, request_head
from backends.launch.supervisor import Launcher
from benchmarks.vllm_cpu.command import serving
from benchmarks.vllm_cpu.engines import POOL
from benchmarks.vllm_cpu.prompts import pieces
from benchmarks.vllm_cpu.quiet import Clock
from gateway.config.load import load_pool
from gateway.service.replicas import plan

POLICIES = ("least_loaded", "round_robin", "learned")
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
OUTPUT_TOKENS = (32, 96, 160, 256)
START_S = 60.0
WARM_UP = 8
"""Requests to each engine before anything is measured: the first ones take seconds."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as it went.

    Parameters
    ----------
    round, policy
        Its turn.
    backend
        Who answered; empty where it failed.
    """

    round: int
    policy: str
    backend: str
    temperature: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What there is to know of one turn beside its requests; `foreign_share` is what others took of one core."""

    round: int
    policy: str
    foreign_share: float


class _Flight:
    """Keeps of an answer what is needed of it."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_s = self.last_s = math.nan
        self.backend = self.failed = ""
        self.usage: dict[str, int] = {}
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held = b""

    def on_head(self, status: int, headers: HeaderList) -> None:
        self.backend = dict(headers).get(b"x-gateway-backend", b"").decode()
        if status != 200:
            self.failed = f"answered {status}"

    def on_data(self, data: bytes) -> None:
        self.last_s = time.perf_counter()
        if math.isnan(self.first_s):
            self.first_s = self.last_s
        *events, self._held = (self._held + data).split(b"\n\n")
        for event in events:
            if b'"usage":{' in event:
                self.usage = orjson.loads(event.removeprefix(b"data: "))["usage"]

    def on_end(self) -> None:
        if not self.failed and not self.usage:
            self.failed = "brought no usage"
        self.ended.set_result(None)

    def on_error(self, error: UpstreamError) -> None:
        self.failed = str(error)
        self.ended.set_result(None)


async def routed(rounds: int, turn_s: float, rate: float, seed: int) -> tuple[list[Sent], list[Turn]]:
    """Start the engines and the gateways, put the load on one after another, and end them.

    Parameters
    ----------
    rounds
        In each, every policy has one turn, in another order.
    turn_s
        How long requests are sent in a turn; the next one begins when all have been answered.
    rate
        Requests a second; Poisson.

    Raises
    ------
    LaunchError
        If an engine does not start.
    """
    found: list[Sent] = []
    turns: list[Turn] = []
    prompts = (text for text, _ in pieces())  # never the same twice: a later policy finds nothing in a cache
    with tempfile.TemporaryDirectory(prefix="routed-") as name:
        async with _engines(Path(name)) as addresses:
            with contextlib.ExitStack() as stack:
                urls = {one: stack.enter_context(_gateway(one, addresses, Path(name), seed)) for one in POLICIES}
                for address in addresses.values():
                    warm_up = [_send(address, next(prompts), 32, 0.0, Random(seed)) for _ in range(WARM_UP)]
                    await asyncio.gather(*warm_up)
                for number in range(rounds):
                    order = [POLICIES[(number + place) % len(POLICIES)] for place in range(len(POLICIES))]
                    for policy in order if number % 2 == 0 else order[::-1]:
                        before = Clock.now()
                        arrivals = Random(f"{seed}/{number}")  # the same moments, lengths and temperatures for all
                        sent = await _turn(urls[policy], prompts, turn_s, rate, arrivals)
                        found += [replace(one, round=number, policy=policy) for one in sent]
                        turns.append(Turn(number, policy, before.foreign_share(Clock.now())))
                        mean_s = fmean(one.e2e_s for one in sent if not one.failed)
                        print(f"round {number} {policy}: {len(sent)} requests, mean {mean_s:.3f} s", file=sys.stderr)
    return found, turns


async def _turn(url: str, prompts: Iterator[str], turn_s: float, rate: float, arrivals: Random) -> list[Sent]:
    due_s, began_s = 0.0, time.perf_counter()
    tasks: list[asyncio.Task[Sent]] = []
    while (due_s := due_s + arrivals.expovariate(rate)) < turn_s:
        tokens, temperature = arrivals.choice(OUTPUT_TOKENS), arrivals.choice(TEMPERATURES)
        await asyncio.sleep(due_s - (time.perf_counter() - began_s))
        tasks.append(asyncio.create_task(_send(url, next(prompts), tokens, temperature, arrivals)))
    return list(await asyncio.gather(*tasks))


async def _send(url: str, prompt: str, tokens: int, temperature: float, arrivals: Random) -> Sent:
    body = orjson.dumps(
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": arrivals.randrange(2**31),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    client = UpstreamClient(Address.parse(url))
    headers = [
        (b"host", client.address.authority),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    flight = _Flight()
    client.send(request_head(b"POST", b"/v1/completions", headers), body, flight)
    try:
        await flight.ended
    finally:
        client.close()
    return Sent(
        0,
        "",
        flight.backend,
        temperature,
        flight.usage.get("prompt_tokens", 0),
        flight.usage.get("completion_tokens", 0),
        flight.first_s - flight.began_s,
        flight.last_s - flight.began_s,
        flight.failed,
    )


@contextlib.asynccontextmanager
async def _engines(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Start the replicas of the pool file, yield their addresses by name, and end them."""
    replicas = plan(load_pool(POOL), folder)
    launcher = Launcher(replicas.launches)
    try:
        await launcher.start()
        await launcher.wait_ready()
        yield {one.name: one.url for one in replicas.backends}
    finally:
        await launcher.stop()


@contextlib.contextmanager
def _gateway(policy: str, addresses: Mapping[str, str], folder: Path, seed: int) -> Iterator[str]:
    """Run a gateway before engines that are up; yield its address when it sees them all."""
    model = load_pool(POOL).models["tiny"]
    backends: dict[str, dict[str, Any]] = {}
    for name, address in addresses.items():
        one = model.backends[name]
        config = one.speculative_config
        backends[name] = {
            "method": one.method.value,
            "url": address,
            **({} if config is None else {"speculative_config": config.model_dump(exclude_unset=True)}),
        }
    chosen: dict[str, Any] = {"name": policy}
    if policy != "round_robin":  # which draws nothing
        chosen["seed"] = seed
    document = {
        "server": {"host": "127.0.0.1"},
        "admin": {"key": "routed"},
        "state": {"file": str(folder / f"{policy}.sqlite")},
        "models": {"tiny": {"policy": chosen, "backends": backends}},
    }
    with serving(document, folder / f"{policy}.yaml", _sees_all, START_S) as url:
        yield url


def _sees_all(url: str) -> bool:
    answer = httpx.get(f"{url}/admin/pool", headers={"authorization": "Bearer routed"}, trust_env=False)
    backends = answer.json()["models"]["tiny"]["backends"]
    return all(one["state"] == "up" for one in backends.values())


def table(sent: Sequence[Sent], first_round: int = 0) -> list[str]:
    """Return a Markdown table: what each policy came to from a round on, and over `least_loaded` in the same round."""
    counted = [one for one in sent if one.round >= first_round]
    lines = [
        "| policy | requests | failed | e2e mean, s | p50 | p99 | TTFT mean, ms | TPOT mean, ms | "
        "mean over least_loaded | shares |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        mine = [one for one in counted if one.policy == policy and not one.failed]
        failed = sum(1 for one in counted if one.policy == policy and one.failed)
        e2e_s = sorted(one.e2e_s for one in mine)
        tpot_s = fmean((one.e2e_s - one.ttft_s) / (one.output_tokens - 1) for one in mine if one.output_tokens > 1)
        names = sorted({one.backend for one in counted} - {""})
        shares = ", ".join(f"{name} {sum(one.backend == name for one in mine) / len(mine):.0%}" for name in names)
        lines.append(
            f"| {policy} | {len(mine)} | {failed} | {fmean(e2e_s):.3f} | {e2e_s[len(e2e_s) // 2]:.3f} "
            f"| {e2e_s[int(0.99 * len(e2e_s))]:.3f} | {1e3 * fmean(one.ttft_s for one in mine):.1f} "
            f"| {1e3 * tpot_s:.2f} | {_over(counted, policy)} | {shares} |"
        )
    return lines


def _over(sent: Sequence[Sent], policy: str) -> str:
    """Return the geometric mean over rounds of the ratio of means, with its 95% interval (Student's t)."""

    def mean_s(number: int, name: str) -> float:
        return fmean(one.e2e_s for one in sent if (one.round, one.policy) == (number, name) and not one.failed)

    rounds = sorted({one.round for one in sent})
    logs = [math.log(mean_s(number, policy) / mean_s(number, "least_loaded")) for number in rounds]
    if policy == "least_loaded":
        return "1"
    if len(logs) < 2:
        return f"{math.exp(fmean(logs)):.3f}"
    half = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(fmean(logs)):.3f} ({math.exp(fmean(logs) - half):.3f} to {math.exp(fmean(logs) + half):.3f})"


def write(path: Path, sent: Sequence[Sent], turns: Sequence[Turn]) -> None:
    """Keep all figures."""
    path.write_bytes(orjson.dumps({"requests": [asdict(one) for one in sent], "turns": [asdict(one) for one in turns]}))
