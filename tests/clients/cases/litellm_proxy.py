"""LiteLLM's proxy in front of the gateway, and behind one: client, gateway, proxy, gateway, engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from backends.launch.ports import free_port
from tests.clients.counters import totals
from tests.clients.report import HELLO, KEY, MODEL, UNKNOWN_MODEL, URL, check, report
from tests.support.waiting import eventually_blocking

MASTER_KEY = "sk-proxy"
ANSWERS = {"front": "", "behind": ""}
"""Addresses of the proxy in front of the gateway, and of a gateway in front of it."""

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # it looks for a tokenizer of the model, for 23 s in each request if there is no network
)

client = httpx.Client(headers={"authorization": f"Bearer {MASTER_KEY}"}, timeout=60.0, trust_env=False)


def until(condition: Callable[[], bool], what: str) -> None:
    def holds() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return condition()
        return False

    eventually_blocking(holds, what=what)


@contextlib.contextmanager
def process(*command: str, ready: str) -> Iterator[None]:
    """Run a server in a process group of its own until it answers at `ready`."""
    child = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True)
    try:
        until(lambda: client.get(ready).status_code == 200, f"{command[0]} to answer")
        yield
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def proxy_settings(where: str) -> dict[str, Any]:
    engine = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
    general: dict[str, Any] = {"master_key": MASTER_KEY}
    if where == "behind":
        # Else each request for its /health, as the gateway sends every two seconds, sends one to every model.
        general |= {"background_health_checks": True, "health_check_interval": 3600}
    return {"model_list": [{"model_name": MODEL, "litellm_params": engine}], "general_settings": general}


def pool(proxy_url: str) -> dict[str, Any]:
    backend = {"method": "baseline", "url": proxy_url, "api_key": MASTER_KEY}
    model = {"policy": {"name": "round_robin"}, "default_temperature": 1.0, "backends": {"proxy": backend}}
    return {"models": {MODEL: model}, "keys": [MASTER_KEY], "state": "none"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": HELLO}], "max_tokens": 60, **fields}


def models(where: str) -> None:
    names = [card["id"] for card in client.get(f"{ANSWERS[where]}/v1/models").json()["data"]]
    check(MODEL in names, names)


def chat(where: str) -> None:
    before = totals()
    answer = client.post(f"{ANSWERS[where]}/v1/chat/completions", json=body())
    check(answer.status_code == 200, answer.text)
    document = answer.json()
    check(document["choices"][0]["message"]["content"], document)
    counted = totals().since(before)
    check((counted.ok, counted.other, counted.output_tokens) == (1, 0, document["usage"]["completion_tokens"]), counted)


def stream(where: str) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 400, "ignore_eos": True}
    arrived_s, tokens = [], 0
    with client.stream("POST", f"{ANSWERS[where]}/v1/chat/completions", json=body(**fields)) as answer:
        check(answer.status_code == 200, answer)
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrived_s.append(time.monotonic())
                tokens = (json.loads(line.removeprefix("data: ")).get("usage") or {}).get("completion_tokens", tokens)
    check(line in {"", "data: [DONE]"}, line)
    check(tokens == 400, tokens)
    check(arrived_s[-1] - arrived_s[0] > 0.5, arrived_s)  # it is made in 2 s


def unknown_model(where: str) -> None:
    answer = client.post(f"{ANSWERS[where]}/v1/chat/completions", json=body(model=UNKNOWN_MODEL))
    check(answer.status_code in {400, 404} and UNKNOWN_MODEL in answer.text, answer.text)


def leaves(where: str) -> None:
    """A client that leaves ends its request at the gateway."""
    before = totals()
    asked = body(stream=True, max_tokens=4000, ignore_eos=True)
    with client.stream("POST", f"{ANSWERS[where]}/v1/chat/completions", json=asked) as answer:
        next(answer.iter_bytes())
    until(lambda: totals().since(before).other == 1, "the gateway to count a cancelled request")
    check(totals().since(before).output_tokens < 4000, totals())


def main() -> None:
    where = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config, file = Path(folder) / "config.yaml", Path(folder) / "pool.yaml"
        config.write_text(json.dumps(proxy_settings(where)))
        proxy = f"http://127.0.0.1:{free_port()}"
        command = (str(Path(sys.executable).parent / "litellm"), "--config", str(config), "--host", "127.0.0.1")
        stack.enter_context(process(*command, "--port", proxy.rpartition(":")[2], ready=f"{proxy}/health/liveliness"))
        ANSWERS["front"] = proxy
        if where == "behind":
            file.write_text(json.dumps(pool(proxy)))
            port = free_port()
            gateway = (os.environ["CLIENTS_GATEWAY"], "-m", "gateway", "--config", str(file), "--port", str(port))
            stack.enter_context(process(*gateway, ready=f"http://127.0.0.1:{port}/readyz"))
            ANSWERS["behind"] = f"http://127.0.0.1:{port}"
        cases = {"models": models, "chat": chat, "stream": stream, "unknown model": unknown_model, "leaves": leaves}
        report("litellm", {name: lambda case=case: case(where) for name, case in cases.items()})


main()
