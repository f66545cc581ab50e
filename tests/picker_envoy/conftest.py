"""One Envoy in front of scripted engines and of two pickers, one at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.launch.ports import free_port
from benchmarks.envoy import manager_of
from benchmarks.metrics_page import total
from tests.support.command import ADMIN_KEY, Command, gateway_command, until
from tests.support.envoy_proxy import Changes, Envoy, envoy_proxy, picker_filter
from tests.support.event_loop import event_loop_in_thread
from tests.support.upstream import END, Upstream, Wire, delta, endless, well

KEY = {"authorization": "Bearer sk-team"}
_POOL = """
health: {{interval_s: 30}}
server: {{drain_s: 5}}
state: none
models:
  m:
    policy: {{name: learned}}
    default_temperature: 1.0
    backends:
      a: {{method: baseline, url: "{a}"}}
      b: {{method: baseline, url: "{b}"}}
  failing:
    policy: {{name: round_robin}}
    default_temperature: 1.0
    backends:
      c: {{method: baseline, url: "{c}"}}
      d: {{method: baseline, url: "{d}"}}
keys:
  - {{name: team, key: sk-team, may_override: true}}
  - {{name: slow, key: sk-slow, requests_per_minute: 1}}
admin: {{key: "{admin}"}}
"""


async def engine(wire: Wire) -> None:
    """Answer as the text of the request asks."""
    body = wire.seen.body
    if b"when told" in body:
        await TOLD.wait()
        await well(wire)
    elif b"endless" in body:
        await endless(wire)
    elif b"paused" in body:
        await wire.stream(delta("one"), delta("two") + END, pause_s=PAUSE_S)
    elif b"parts" in body:
        await parts(wire)
    else:
        await well(wire)


PAUSE_S = 1.0
FIRST_S = 0.1
TOLD = asyncio.Event()


async def parts(wire: Wire) -> None:
    """Answer with a stream whose pieces are cut in the middle of events, and whose end comes alone."""
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}}
    text = b"".join(delta(word) for word in ("one", "two", "three", "four"))
    text += b"data: " + json.dumps(usage).encode() + b"\n\n" + END
    await wire.begin_stream()
    await asyncio.sleep(FIRST_S)
    for begin in range(0, len(text), 50):
        await wire.chunk(text[begin : begin + 50])
        await asyncio.sleep(0.002)
    await asyncio.sleep(FIRST_S)
    await wire.end_stream()


@dataclass
class Stage:
    """Engines, pickers and Envoy.

    Attributes
    ----------
    pickers
        The running pickers, by their numbers.
    """

    engines: dict[str, Upstream]
    envoy: Envoy
    _folder: Path
    _pool: Path
    _addresses: list[str]
    _run: Any
    pickers: dict[int, Command] = field(default_factory=dict)
    _running: dict[int, ExitStack] = field(default_factory=dict)

    def start(self, number: int) -> Command:
        """Start a picker at its address, and wait until Envoy knows of it."""
        folder = self._folder / f"picker{number}"
        folder.mkdir(exist_ok=True)
        picker = gateway_command(self._pool, folder, "--listen", self._addresses[number], subcommand="picker")
        running = self._running[number] = ExitStack()
        command = self.pickers[number] = running.enter_context(picker)
        assert command.picker, command.printed()
        until(lambda: command.get("/readyz").status_code == httpx.codes.OK)
        self.until_known(len(self.pickers))
        return command

    def stop(self, number: int) -> None:
        """Check that nothing of a picker is left."""
        del self.pickers[number]
        self._running.pop(number).close()

    def stop_all(self) -> None:
        for number in list(self._running):
            self.stop(number)

    def until_known(self, healthy: int) -> None:
        until(lambda: self.envoy.statistic("cluster.picker.membership_healthy") == healthy)

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Close an engine's connections, and refuse new ones for a time."""
        self._run(self.engines[name].die())
        try:
            yield
        finally:
            self._run(self.engines[name].come_back())

    def tell_engines(self) -> None:
        """Let engines answer the requests that are on hold."""

        async def tell() -> None:
            TOLD.set()
            TOLD.clear()

        self._run(tell())

    def chat(
        self,
        text: str = "hi",
        *,
        model: str = "m",
        listener: str = "",
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        """Send a request through Envoy."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        headers = KEY | (headers or {})
        return httpx.post(self.url(listener), json=body, headers=headers, timeout=30.0, trust_env=False)

    def stream(self, text: str, listener: str = "", **headers: str) -> AbstractContextManager[httpx.Response]:
        """Send a request through Envoy, and yield its answer as it comes."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
        url = self.url(listener)
        return httpx.stream("POST", url, json=body, headers=KEY | headers, timeout=30.0, trust_env=False)

    def url(self, listener: str = "") -> str:
        return f"{self.envoy.urls[listener]}/v1/chat/completions"

    def metric(self, series: str, *, picker: int = 0, **labels: str) -> float:
        return total(self.pickers[picker].get("/metrics").text, series, **labels)


def _with_answers(mode: str) -> Changes:
    """Return what has answers pass through the picker, with one filter."""

    def change(listener: dict[str, Any]) -> None:
        picker_filter(listener)["processing_mode"]["response_body_mode"] = mode
        manager = manager_of(listener)
        manager["http_filters"] = [each for each in manager["http_filters"] if not each["name"].endswith("answers")]

    return change


LISTENERS: dict[str, Changes] = {
    "small pieces": lambda listener: listener.update(per_connection_buffer_limit_bytes=4096),
    "full duplex": _with_answers("FULL_DUPLEX_STREAMED"),
    "not shown": _with_answers("NONE"),
}


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    with ExitStack() as stack:
        run = stack.enter_context(event_loop_in_thread())
        models = {"a": "m", "b": "m", "c": "failing", "d": "failing"}
        engines = {name: Upstream(name, model, engine) for name, model in models.items()}
        for each in engines.values():
            run(each.listen(0))
        pool = folder / "pool.yaml"
        urls = {name: each.url for name, each in engines.items()}
        pool.write_text(_POOL.format(admin=ADMIN_KEY, **urls))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        replicas = [url.removeprefix("http://") for url in urls.values()]
        envoy = stack.enter_context(envoy_proxy(folder, addresses, replicas, LISTENERS))
        stage = Stage(engines, envoy, folder, pool, addresses, run)
        for each in engines.values():
            stack.callback(lambda upstream: run(upstream.die()), each)
        stack.callback(stage.stop_all)
        stage.start(0)
        yield stage
