"""The demo: its phases, from the start of the gateway to its end."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx

from lab.demo.requests import CHAT, EDITS, MODEL, DemoKind
from lab.live.command import run_live
from lab.replay.options import ReplayOptions
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace

_START_S = 60.0
_POLL_S = 0.05
_UNTIL_INPUT_ENDS = 'exec 3<&0; "$@" & gateway=$!; { read _ <&3; kill $gateway; } & wait $gateway'
"""Shell command that runs another one, and ends it once its input closes."""


_PHASES = (("chat at temperature 0.7", 0.9), ("code edits at temperature 0", 0.1))
"""Name and share of chat of each phase; the other requests are edits."""
_PLAIN, _HEAD, _BLOCK_S = "plain", "head", 6.0
"""The replicas compared meanwhile, and the seconds of a block."""
_LEAST_PHASE_S = 30.0
"""Shorter phases end before anything can be found."""
_MAX_TOKENS = 100
_INTERRUPTED = 130


@contextmanager
def running_gateway(port: int, folder: Path, key: str) -> Iterator[httpx.Client]:
    """Run a gateway with the demo's pool until the block ends; `folder` holds its state and log.

    Yields a client for `/admin` that sends the key.
    """
    log = folder / "gateway.log"
    config = str(resources.files("lab.demo") / "pool.yaml")
    command = [sys.executable, "-m", "gateway", "--config", config, "--port", str(port)]
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603 -- our own program
            ["/bin/sh", "-c", _UNTIL_INPUT_ENDS, "sh", *command],
            env={**os.environ, "DEMO_FOLDER": str(folder), "DEMO_ADMIN_KEY": key},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=_url(process, log), headers=headers, timeout=60.0, trust_env=False) as client:
            while not all_up(client):  # a comparison needs both replicas
                time.sleep(_POLL_S)
            yield client


def all_up(client: httpx.Client) -> bool:
    """Return whether every replica is up; `/readyz` asks for only one per model."""
    models = client.get("/admin/pool").raise_for_status().json()["models"]
    return all(each["state"] == "up" for model in models.values() for each in model["backends"].values())


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the gateway's address once it listens."""
    until_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until_s:
        if match := re.search(r"Listening at (\S+)", log.read_text("utf-8")):
            return match[1]
        time.sleep(_POLL_S)
    raise RuntimeError(log.read_text("utf-8"))


def run_demo(port: int, rate: float, phase_s: float, phases: int | None) -> None:
    """Run a gateway with simulated replicas on chat that turns into code edits and back, and show its page."""
    print("Starting a gateway with five simulated replicas ...", flush=True)
    key = secrets.token_hex(16)
    with TemporaryDirectory(prefix="gateway-demo-") as name, running_gateway(port, Path(name), key) as client:
        url = str(client.base_url).rstrip("/")
        print(f"Open {url}/dashboard#key={key}\nCtrl-C ends it.\n", flush=True)  # browsers do not send what follows #
        if phase_s >= _LEAST_PHASE_S:
            asked = {"a": _PLAIN, "b": _HEAD, "block_s": _BLOCK_S, "explore": 0, "usual": False}
            client.post("/admin/compare/start", json=asked).raise_for_status()
        trace = Path(name) / "phase.jsonl"
        for number in count() if phases is None else range(phases):
            phase, chat_share = _PHASES[number % len(_PHASES)]
            print(f"{number * phase_s:4.0f} s  {phase}: {chat_share:.0%} chat, the rest edits", flush=True)
            write_trace(trace, _requests(chat_share, round(rate * phase_s), Random(number)))
            options = ReplayOptions(trace=(trace,), live=(f"demo={url}",), rate=(rate,), seed=number)
            if run_live(options) == _INTERRUPTED:
                return
            print(f"{_rules(client)}\n{_found(client)}\n", flush=True)


def _requests(chat_share: float, count: int, random: Random) -> list[TraceRecord]:
    """Return `count` requests without times."""
    kinds: list[DemoKind] = [CHAT if random.random() < chat_share else EDITS for _ in range(count)]
    return [
        TraceRecord(
            model=MODEL,
            workload=kind.workload,
            temperature=kind.temperature,
            max_tokens=_MAX_TOKENS,
            messages=kind.messages(random),
        )
        for kind in kinds
    ]


def _found(client: httpx.Client) -> str:
    """Return the finding so far on the replica with a head against the plain one."""
    found = client.get("/admin/compare").raise_for_status().json()["models"].get(MODEL)
    return "" if found is None else f"compared, {found['stage']}: {found['sentence']}"


def _rules(client: httpx.Client) -> str:
    """Distill what was learned into rules, and return their number in words."""
    answer = client.post("/admin/policy/distill", json={"model": MODEL})
    if not answer.is_success:
        return f"no rules yet: {answer.json()['error']['message']}"
    rules = answer.json()
    return f"rules, version {rules['version']}: {rules['leaves']} rules"
