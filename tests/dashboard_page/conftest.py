"""A gateway under load with its page in Chromium: one browser and one gateway for all of these tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from backends.launch.ports import free_port
from lab.demo.requests import CHAT, EDITS, MODEL
from tests.support.command import ADMIN_KEY, Command, gateway_command, until
from tests.support.deploy_tools import tool

POOL = """
models:
  llama-3.1-8b:
    policy: {name: learned, guardrail: {share: 0.2}}
    backends:
      plain: {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
      tree: {method: suffix, simulate: {calibration: llama-3.1-8b-h100}}
      head:
        method: eagle3
        simulate: {calibration: llama-3.1-8b-h100}
        speculative_config: {num_speculative_tokens: 3, rejection_sample_method: fly}
  other:
    policy: {name: least_loaded}
    backends:
      only: {method: baseline, simulate: {calibration: llama-3.1-8b-h100}}
state: {file: "STATE"}
admin: {key: "${GATEWAY_ADMIN_KEY}"}
"""
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
WAIT_MS = 30_000.0


class Served:
    """A gateway that can be stopped, and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port, self._running = folder, free_port(), ExitStack()
        self._config = folder / "pool.yaml"
        self._config.write_text(POOL.replace("STATE", str(folder / "state.sqlite")))
        self.start()

    def start(self) -> None:
        command = gateway_command(self._config, self._folder, "--port", str(self._port))
        self.gateway: Command = self._running.enter_context(command)
        until(lambda: self.gateway.get("/readyz").status_code == 200)

    def stop(self) -> None:
        self._running.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


@contextmanager
def load(url: str) -> Iterator[None]:
    """Send one request after the other, chat and edits in turn, until the block ends."""
    over = threading.Event()

    def send() -> None:
        random = Random(0)
        with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as client:
            for kind in cycle((CHAT, EDITS)):
                if over.is_set():
                    return
                body = {"model": MODEL, "messages": kind.messages(random), "temperature": kind.temperature}
                body |= {"max_tokens": 180, "stream": True, "stream_options": {"include_usage": True}}
                headers = {"x-gateway-workload": kind.workload}
                try:
                    client.post("/v1/chat/completions", json=body, headers=headers)
                except httpx.HTTPError:
                    over.wait(0.2)  # the gateway is being restarted

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class Watched:
    """A page, with what it should not have done."""

    page: Page
    wrong: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()
    """Parts of messages that the test provokes."""

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.wrong.append(message.text)

    def on_request(self, request: Request) -> None:
        if urlsplit(request.url).hostname != "127.0.0.1":
            self.wrong.append(f"asked another host: {request.url}")

    def check(self) -> None:
        assert [text for text in self.wrong if not any(part in text for part in self.allowed)] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=tool("chromium"), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("dashboard"))
    with load(served.url):
        yield served
    served.stop()


@pytest.fixture
def watched(browser: Browser, served: Served) -> Iterator[Watched]:
    """A new page without a key; at the end it must have logged no error and asked no other host."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    watched = Watched(context.new_page())
    watched.page.on("console", watched.on_console)
    watched.page.on("pageerror", lambda error: watched.wrong.append(str(error)))
    watched.page.on("request", watched.on_request)
    yield watched
    watched.page.evaluate("0")  # its answer comes after all earlier messages
    try:
        watched.check()  # before the page is closed: its scripts may still run while its elements go
    finally:
        context.close()


@pytest.fixture
def page(watched: Watched, served: Served) -> Page:
    """A page that shows the pool."""
    watched.page.goto(f"{served.url}/dashboard#key={ADMIN_KEY}")
    watched.page.locator("#pool-table tbody tr").first.wait_for()
    return watched.page
