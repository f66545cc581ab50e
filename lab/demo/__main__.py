"""The demo's command: `scripts/demo`, or `python -m lab.demo`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import webbrowser
from collections.abc import Coroutine
from itertools import count
from typing import Annotated

import httpx
import typer

from backends import background
from backends.http.client import Address
from lab.demo.process import DemoGateway, running_gateway
from lab.demo.requests import MODEL
from lab.demo.traffic import PHASES, Phase, PhaseLoad

_DISTILL_AT = 0.85  # of a phase


def main(
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 takes a free one.")] = 0,
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.1)] = 14.0,
    phase_s: Annotated[float, typer.Option(help="Seconds until the load changes.", min=1)] = 60.0,
    phases: Annotated[int | None, typer.Option(help="Number of phases; without it, until Ctrl-C.", min=1)] = None,
    browse: Annotated[bool, typer.Option(help="Open the page in a browser, if there is a screen.")] = True,
) -> None:
    """Run a gateway with simulated replicas under chat that turns into code edits and back, and show its page."""
    asyncio.run(_until_stopped(_demo(port, rate, phase_s, phases, browse=browse)))


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    """Run `work` until it ends, or until SIGINT or SIGTERM, which end it in an orderly way."""
    task = background.start("lab", work, raises=Exception)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _demo(port: int, rate: float, phase_s: float, phases: int | None, *, browse: bool) -> None:
    print("Starting a gateway with five simulated replicas ...", flush=True)
    async with running_gateway(port) as gateway, gateway.client() as client:
        print(f"Open {gateway.page_url}\nCtrl-C ends it.\n", flush=True)
        if browse and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(gateway.page_url)
        for number in count() if phases is None else range(phases):
            phase = PHASES[number % len(PHASES)]
            await _play(gateway, client, phase, number, rate, phase_s)


async def _play(
    gateway: DemoGateway, client: httpx.AsyncClient, phase: Phase, number: int, rate: float, phase_s: float
) -> None:
    """Send the requests of a phase, distil towards its end, and print what came of it."""
    print(f"{number * phase_s:4.0f} s  {phase.name}: {phase.chat_share:.0%} chat, the rest edits", flush=True)
    load = PhaseLoad(Address.parse(gateway.url), phase, rate, phase_s, seed=number)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        tasks.create_task(_distil(client, phase_s * _DISTILL_AT))
    shares = ", ".join(f"{backend} {share:.0%}" for backend, share in load.shares().items())
    print(f"        went to {shares}{_failed(load)}\n        {await _gain(client)}", flush=True)


async def _distil(client: httpx.AsyncClient, after_s: float) -> None:
    await asyncio.sleep(after_s)
    answer = await client.post("/admin/policy/distill", json={"model": MODEL})
    if answer.is_success:
        rules = answer.json()
        print(
            f"        rules, version {rules['version']}: {rules['leaves']} rules, "
            f"expected time to finish over least_loaded {-rules['rules_gain']:+.0%}",
            flush=True,
        )
    else:
        print(f"        no rules yet: {answer.json()['error']['message']}", flush=True)


def _failed(load: PhaseLoad) -> str:
    kinds = ", ".join(f"{amount} {kind}" for kind, amount in load.failures().items())
    return f"; failed: {kinds}" if kinds else ""


async def _gain(client: httpx.AsyncClient) -> str:
    (model,) = (await client.get("/admin/dashboard/snapshot")).json()["models"]
    gain = model["gain"]
    if gain["ratio"] is None:
        return "time per unit of work over least_loaded: too early"
    interval = f"{gain['confidence']:.0%} interval {gain['low']:.2f} to {gain['high']:.2f}"
    blocks = f"{gain['control_blocks']} blocks of time under least_loaded"
    return f"time per unit of work over least_loaded: {gain['ratio']:.2f} ({interval}; {blocks})"


if __name__ == "__main__":
    try:
        typer.run(main)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
