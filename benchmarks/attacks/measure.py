"""One attack on one running system: what it does to a bystander and to memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attacks.attacker import Report
from benchmarks.process import is_alive, rss_mb, tree
from benchmarks.systems import environment

_MOST_MB = 6_000
"""Memory at which an attack ends, so that the machine survives it."""
_QUIET_S, _SAMPLE_S, _ATTACK_S = 1.0, 0.1, 240.0


@dataclass(kw_only=True)
class Result(Report):
    """What an attack did.

    Parameters
    ----------
    verdict
        `survived`, `hurt bystanders` (a request was lost, or waited for more than a second) or `died`.
    requests, lost
        Of the bystander; the lost ones by status or error.
    """

    system: str
    attack: str
    verdict: str = ""
    requests: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    worst_s: float = 0.0
    rss_before_mb: float = 0.0
    rss_peak_mb: float = 0.0
    rss_after_mb: float = 0.0


class _Memory(threading.Thread):
    """Samples the memory of a process tree, and ends an attack that takes too much of it."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ends = threading.Event()
        self.before_mb = self.peak_mb = rss_mb(tree(pid))
        self.attacker: subprocess.Popen[str] | None = None
        self.is_exceeded = False

    def run(self) -> None:
        while not self._ends.wait(_SAMPLE_S):
            now_mb = rss_mb(tree(self._pid))
            self.peak_mb = max(self.peak_mb, now_mb)
            if now_mb > _MOST_MB and self.attacker is not None:
                self.is_exceeded = True
                self.attacker.terminate()

    def end(self) -> float:
        """Stop, and return the memory now."""
        self._ends.set()
        self.join()
        return rss_mb(tree(self._pid))


def attack(system: str, name: str, port: int, upstream: int, pid: int, folder: Path, hold_s: float) -> Result:
    """Attack a system while a bystander uses it."""
    result = Result(system=system, attack=name)
    env = environment(upstream, folder)
    bystander = _start("bystander", port, log=folder / "bystander.log", env=env)
    assert bystander.stdout is not None
    bystander.stdout.readline()
    memory = _Memory(pid)
    memory.start()
    time.sleep(_QUIET_S)
    attacker = memory.attacker = _start("attacker", name, port, hold_s, log=folder / "attacker.log", env=env)
    try:
        report = attacker.communicate(timeout=_ATTACK_S)[0]
    except subprocess.TimeoutExpired:
        attacker.kill()
        report = attacker.communicate()[0]
        result.notes.append(f"the attack was ended after {_ATTACK_S:g} s")
    if report.strip():
        for key, value in json.loads(report).items():
            setattr(result, key, [*result.notes, *value] if key == "notes" else value)
    time.sleep(_QUIET_S)
    result.rss_before_mb, result.rss_after_mb, result.rss_peak_mb = memory.before_mb, memory.end(), memory.peak_mb
    if memory.is_exceeded:
        result.notes.append(f"the attack was ended at {_MOST_MB} MB")
    _judge(result, json.loads(bystander.communicate("", timeout=60)[0].splitlines()[-1]), pid)
    return result


def _judge(result: Result, seen: dict[str, Any], pid: int) -> None:
    result.requests, result.lost = len(seen["waits_s"]), seen["lost"]
    result.worst_s = max(seen["waits_s"])
    if not is_alive(pid):
        result.verdict = "died"
    else:
        result.verdict = "hurt bystanders" if result.lost or result.worst_s > 1.0 else "survived"


def _start(module: str, *arguments: object, log: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", f"benchmarks.attacks.{module}", *map(str, arguments)]
    with log.open("ab") as errors:
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **env}
        )
