"""Runs every client against the gateway and prints a table: scripts/test-clients [--load] [CLIENT...].

The gateway has the simulated replicas of config/pool.yaml. A failure that is not listed in `KNOWN` counts as the
gateway's own, and so does a listed one that has passed: the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from backends.launch.ports import free_port
from benchmarks.table import head, row
from tests.support.command import Command, gateway_command, until
from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "clients"
CASES = ROOT / "tests" / "clients" / "cases"
COLUMNS = (
    *("models", "chat", "stream", "completions", "responses", "cut short", "tools", "structured"),
    *("unknown model", "wrong key", "retry after 429"),
    *("leaves", "completes", "tokens"),
)
MODEL = "llama-3.1-8b"
KEY, LIMITED_KEY = "sk-clients", "sk-clients-limited"
TIMEOUT_S = 300.0


KNOWN: Mapping[tuple[str, str], str] = {
    ("openai-agents", "cut short"): "it takes no whole response that is `incomplete`, whichever server sent it",
}
"""Faults of clients, by client and case."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client and how its script is run.

    Parameters
    ----------
    command
        Command line; each part may contain `{cases}` and `{cache}`.
    needs
        Programs that must be installed.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


def _python(name: str, script: str, environment: str = "openai-3", needs: tuple[str, ...] = ()) -> Client:
    return Client(name, (f"{{cache}}/{environment}/bin/python", "-P", f"{{cases}}/{script}.py"), needs)


CLIENTS = (
    _python("openai (Python)", "openai_python"),
    Client("openai (Node.js)", ("node", "{cases}/openai_node.mjs"), ("node",)),
    _python("anthropic (Python)", "anthropic_python"),
    _python("langchain-openai", "langchain_chat"),
    _python("llama-index-llms-openai-like", "llama_index_like", "openai-2"),
    _python("litellm", "litellm_sdk", "openai-2"),
    _python("pydantic-ai", "pydantic_agent"),
    _python("instructor", "instructor_models", "openai-2"),
    _python("openai-agents", "agents_sdk"),
    Client("java.net.http", ("java", "{cases}/JdkClient.java"), ("java",)),
    _python("Chromium, fetch", "browser", needs=("chromium", "chromedriver")),
)


LOADS = (
    Client("vllm bench serve", (".venv-vllm/bin/python", "-P", "{cases}/load_vllm_bench.py"), (".venv-vllm/bin/vllm",)),
    Client("litellm proxy in front", ("{cache}/litellm-proxy/bin/python", "-P", "{cases}/litellm_proxy.py", "front")),
    Client("litellm proxy behind", ("{cache}/litellm-proxy/bin/python", "-P", "{cases}/litellm_proxy.py", "behind")),
)
"""vLLM's load tool, and neighbours."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case; `error` is None if it has passed."""

    client: str
    version: str
    case: str
    error: str | None

    @property
    def verdict(self) -> str:
        """Return `passed`, or whether it is a known fault of the client."""
        fault = KNOWN.get((self.client, self.case))
        if self.error is None:
            return "passed" if fault is None else "passed, but listed as failing"
        return "FAILED" if fault is None else "fails (client)"

    @property
    def is_ours(self) -> bool:
        """Return whether the gateway, or the list, has to change."""
        return (self.error is None) is ((self.client, self.case) in KNOWN)


@contextmanager
def gateway(folder: Path, page_port: int) -> Iterator[Command]:
    """Run a gateway with the keys of the clients, and access for the page."""
    pool = {
        "models": yaml.safe_load((ROOT / "config" / "pool.yaml").read_text("utf-8"))["models"],
        "keys": [{"name": "clients", "key": KEY}, {"name": "limited", "key": LIMITED_KEY, "max_in_flight": 1}],
        "cors": {"origins": [f"http://127.0.0.1:{page_port}"]},
    }
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool), "utf-8")
    with gateway_command(folder / "pool.yaml", folder) as command:
        until(lambda: command.get("/readyz").status_code == 200)
        yield command


def tokenizer() -> Path:
    """Return a folder with the tokenizer of the simulated replicas, as load tools read it."""
    folder = CACHE / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "backends" / "simulator" / "text" / "assets" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def run(client: Client, command: Command, page_port: int) -> list[Result]:
    """Return the results of a client."""
    argv = [part.format(cases=CASES, cache=CACHE) for part in client.command]
    nowhere = "http://127.0.0.1:9"  # nothing may leave the machine: telemetry, price lists, vocabularies
    env = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "PYTHONPATH": str(ROOT),
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "CLIENTS_URL": command.url,
        "CLIENTS_MODEL": MODEL,
        "CLIENTS_KEY": KEY,
        "CLIENTS_LIMITED_KEY": LIMITED_KEY,
        "CLIENTS_GATEWAY": sys.executable,
        "CLIENTS_TOKENIZER": str(tokenizer()),
        "CLIENTS_NODE": str(CACHE / "node"),
        "CLIENTS_PAGE_PORT": str(page_port),
        "CLIENTS_CHROMIUM": shutil.which("chromium") or "",
        "CLIENTS_CHROMEDRIVER": shutil.which("chromedriver") or "",
    }
    log = CACHE / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', client.name.lower())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    version = next((line["version"] for line in lines if "version" in line), "?")
    results = [Result(client.name, version, line["case"], line["error"]) for line in lines if "case" in line]
    if process.returncode or not results:
        tail = log.read_text("utf-8").strip().splitlines()[-1:]
        results.append(Result(client.name, version, "its script", f"exit status {process.returncode}: {tail}"))
    return results


def table(results: Sequence[Result]) -> str:
    """Return the results in Markdown: a row per client, a column per case, and the failures below."""
    columns = [case for case in (*COLUMNS, "its script") if any(result.case == case for result in results)]
    lines = [head("client", "version", *columns)]
    for name in dict.fromkeys(result.client for result in results):
        own = {result.case: result for result in results if result.client == name}
        version = next(iter(own.values())).version
        lines.append(row(name, version, *(own[case].verdict if case in own else "" for case in columns)))
    for result in results:
        fault = KNOWN.get((result.client, result.case))
        if fault is not None:
            lines.append(f"\n- {result.client}, {result.case}: {fault}")
        if result.is_ours:
            lines.append(f"\n- **{result.client}, {result.case}**: {(result.error or result.verdict)[:400]}")
    return "\n".join(lines)


def main() -> int:
    """Run the clients, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/test-clients")
    names = [client.name for client in CLIENTS + LOADS]
    parser.add_argument("--load", action="store_true", help="a load tool and neighbours instead of clients")
    parser.add_argument("client", nargs="*", help=f"part of a client's name, of {', '.join(names)}; by default all")
    arguments = parser.parse_args()
    wanted = arguments.client
    chosen = [
        client
        for client in (LOADS if arguments.load else CLIENTS)
        if not wanted or any(part in client.name for part in wanted)
    ]
    if not chosen:
        parser.error(f"no such client: {', '.join(wanted)}")
    page_port = free_port()
    results: list[Result] = []
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), page_port) as command:
        for client in chosen:
            if lacking := [program for program in client.needs if shutil.which(program) is None]:
                missing.append(f"{client.name}: not run, needs {', '.join(lacking)}")
                continue
            print(client.name, file=sys.stderr, flush=True)
            results += run(client, command, page_port)
    print(f"\n{table(results)}\n", *missing, sep="\n", flush=True)
    return int(not results or any(result.is_ours for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
