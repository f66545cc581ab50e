"""A simulator process shared by the tests of its HTTP server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import pytest

from backends.calibration.load import load_calibration
from backends.simulator.engine.fleet import SimulatedReplica, load_rules
from backends.speculation import Method

MODEL = "llama-3.1-8b"
NGRAM = {"method": "ngram", "speculative_config": {"num_speculative_tokens": 5, "prompt_lookup_max": 4}}
EAGLE3 = {"method": "eagle3", "speculative_config": {"num_speculative_tokens": 3}}


@dataclass
class Simulator:
    """A running simulator process.

    Parameters
    ----------
    urls
        URLs by replica name.
    """

    process: subprocess.Popen[bytes]
    urls: dict[str, str]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(10)


def start(*replicas: dict[str, Any]) -> Simulator:
    """Start a process with these replicas; settings left out have the defaults of the tests."""
    filled = [{"model": MODEL, "time_scale": 0.1, "max_model_len": 2048, **replica} for replica in replicas]
    process = subprocess.Popen(
        [sys.executable, "-m", "backends.simulator"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    stdin.write(json.dumps({"replicas": filled}).encode())
    stdin.close()
    line = stdout.readline()
    stdout.close()
    if not line:
        raise AssertionError(f"the simulator exited with {process.wait(10)}")
    urls = {entry["name"]: entry["url"] for entry in json.loads(line)["ready"]}
    return Simulator(process, urls)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile the step rules in a new checkout, so that no test has to wait for it."""
    load_rules(SimulatedReplica("a", load_calibration("llama-3.1-8b-h100"), Method.BASELINE))


@pytest.fixture(scope="session")
def simulator() -> Iterator[Simulator]:
    """Replicas of one model: four methods, a slow one, and one with an API key."""
    running = start(
        {"name": "plain"},
        {"name": "lookup", **NGRAM},
        {"name": "eagle3", **EAGLE3},
        {"name": "asked", **EAGLE3, "draft_depth": True},
        {"name": "slow", **NGRAM, "time_scale": 5.0},
        {"name": "locked", "api_key": "s3cret", "served_model_names": ["alias", "other"]},
    )
    yield running
    assert running.stop() == 0
