"""Policies in turn on real engines: the same four replicas, one gateway per policy, the same load for each.

A policy learns only in its own turns. The engines share the machine's cores, so that each slows down all others, which
no policy models; with one GPU per replica this would not happen.
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

from backends.http.address import Address
from backends.http.client import UpstreamClient
from backends.http.receiver import HeaderList, UpstreamError
from backends.http.wire import request_head
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
"""Requests to each engine before the measurement, because the first ones take seconds."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request with its result.

    Parameters
    ----------
    round, policy
        The turn in which it was sent.
    backend
        Backend that answered; empty if the request failed.
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
    """One turn of a policy; `foreign_share` is the CPU time of other processes in shares of one core."""

    round: int
    policy: str
    foreign_share: float


class _Call:
    """A request in flight, which keeps the times, the backend and the usage of its answer."""

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
            self.failed = "the answer has no usage"
        self.ended.set_result(None)

    def on_error(self, error: UpstreamError) -> None:
        self.failed = str(error)
        self.ended.set_result(None)


async def routed(rounds: int, turn_s: float, rate: float, seed: int) -> tuple[list[Sent], list[Turn]]:
    """Start engines and gateways, load one gateway after another, and stop them at the end.

    Parameters
    ----------
    rounds
        Number of rounds; each policy has one turn per round, in varying order.
    turn_s
        Seconds per turn in which requests are sent; the next turn begins when all have been answered.
    rate
        Requests per second; Poisson.

    Raises
    ------
    LaunchError
        If an engine does not start.
    """
    results: list[Sent] = []
    turns: list[Turn] = []
    prompts = (
        text for text, _ in pieces()
    )  # all different, so that no policy profits from prefixes cached for another
    with tempfile.TemporaryDirectory(prefix="routed-") as name:
        async with _engines(Path(name)) as addresses:
            with contextlib.ExitStack() as stack:
                urls = {
                    policy: stack.enter_context(_gateway(policy, addresses, Path(name), seed)) for policy in POLICIES
                }
                for address in addresses.values():
                    warm_up = [_send(address, next(prompts), 32, 0.0, Random(seed)) for _ in range(WARM_UP)]
                    await asyncio.gather(*warm_up)
                for number in range(rounds):
                    order = [POLICIES[(number + index) % len(POLICIES)] for index in range(len(POLICIES))]
                    for policy in order if number % 2 == 0 else order[::-1]:
                        before = Clock.now()
                        arrivals = Random(f"{seed}/{number}")  # the same arrivals, lengths and temperatures for all
                        sent = await _turn(urls[policy], prompts, turn_s, rate, arrivals)
                        results += [replace(request, round=number, policy=policy) for request in sent]
                        turns.append(Turn(number, policy, before.foreign_share(Clock.now())))
                        mean_s = fmean(request.e2e_s for request in sent if not request.failed)
                        print(f"round {number} {policy}: {len(sent)} requests, mean {mean_s:.3f} s", file=sys.stderr)
    return results, turns


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
    call = _Call()
    client.send(request_head(b"POST", b"/v1/completions", headers), body, call)
    try:
        await call.ended
    finally:
        client.close()
    return Sent(
        0,
        "",
        call.backend,
        temperature,
        call.usage.get("prompt_tokens", 0),
        call.usage.get("completion_tokens", 0),
        call.first_s - call.began_s,
        call.last_s - call.began_s,
        call.failed,
    )


@contextlib.asynccontextmanager
async def _engines(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Start the replicas of the pool file, yield their URLs by name, and stop them at the end."""
    replicas = plan(load_pool(POOL), folder)
    launcher = Launcher(replicas.launches)
    try:
        await launcher.start()
        await launcher.wait_ready()
        yield {backend.name: backend.url for backend in replicas.backends}
    finally:
        await launcher.stop()


@contextlib.contextmanager
def _gateway(policy: str, addresses: Mapping[str, str], folder: Path, seed: int) -> Iterator[str]:
    """Run a gateway in front of running engines; yield its URL when all of them are up."""
    model = load_pool(POOL).models["tiny"]
    backends: dict[str, dict[str, Any]] = {}
    for name, address in addresses.items():
        backend = model.backends[name]
        config = backend.speculative_config
        backends[name] = {
            "method": backend.method.value,
            "url": address,
            **({} if config is None else {"speculative_config": config.model_dump(exclude_unset=True)}),
        }
    chosen: dict[str, Any] = {"name": policy}
    if policy != "round_robin":  # has no random draws
        chosen["seed"] = seed
    document = {
        "server": {"host": "127.0.0.1"},
        "admin": {"key": "routed"},
        "state": {"file": str(folder / f"{policy}.sqlite")},
        "models": {"tiny": {"policy": chosen, "backends": backends}},
    }
    with serving(document, folder / f"{policy}.yaml", _all_up, START_S) as url:
        yield url


def _all_up(url: str) -> bool:
    answer = httpx.get(f"{url}/admin/pool", headers={"authorization": "Bearer routed"}, trust_env=False)
    backends = answer.json()["models"]["tiny"]["backends"]
    return all(backend["state"] == "up" for backend in backends.values())


def table(sent: Sequence[Sent], first_round: int = 0) -> list[str]:
    """Return a Markdown table of each policy's figures from a round on, and their ratio to `least_loaded`."""
    counted = [request for request in sent if request.round >= first_round]
    lines = [
        "| policy | requests | failed | e2e mean, s | p50 | p99 | TTFT mean, ms | TPOT mean, ms | "
        "mean over least_loaded | shares |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        answered = [request for request in counted if request.policy == policy and not request.failed]
        failed = sum(1 for request in counted if request.policy == policy and request.failed)
        e2e_s = sorted(request.e2e_s for request in answered)
        tpot_s = fmean(
            (request.e2e_s - request.ttft_s) / (request.output_tokens - 1)
            for request in answered
            if request.output_tokens > 1
        )
        names = sorted({request.backend for request in counted} - {""})
        shares = ", ".join(
            f"{name} {sum(request.backend == name for request in answered) / len(answered):.0%}" for name in names
        )
        lines.append(
            f"| {policy} | {len(answered)} | {failed} | {fmean(e2e_s):.3f} | {e2e_s[len(e2e_s) // 2]:.3f} "
            f"| {e2e_s[int(0.99 * len(e2e_s))]:.3f} | {1e3 * fmean(request.ttft_s for request in answered):.1f} "
            f"| {1e3 * tpot_s:.2f} | {_over(counted, policy)} | {shares} |"
        )
    return lines


def _over(sent: Sequence[Sent], policy: str) -> str:
    """Return the geometric mean over rounds of the ratio of means, with its 95% interval (Student's t)."""

    def mean_s(number: int, name: str) -> float:
        turn = [request for request in sent if (request.round, request.policy) == (number, name)]
        return fmean(request.e2e_s for request in turn if not request.failed)

    rounds = sorted({request.round for request in sent})
    logs = [math.log(mean_s(number, policy) / mean_s(number, "least_loaded")) for number in rounds]
    if policy == "least_loaded":
        return "1"
    if len(logs) < 2:
        return f"{math.exp(fmean(logs)):.3f}"
    half = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(fmean(logs)):.3f} ({math.exp(fmean(logs) - half):.3f} to {math.exp(fmean(logs) + half):.3f})"


def write(path: Path, sent: Sequence[Sent], turns: Sequence[Turn]) -> None:
    """Write all requests and turns as JSON."""
    document = {"requests": [asdict(request) for request in sent], "turns": [asdict(turn) for turn in turns]}
    path.write_bytes(orjson.dumps(document))
