"""A replay's page in Chromium: nothing is loaded, nothing sticks out on a phone, and axe finds no fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.lab.invoked import run
from tests.support.paths import CONFIG, DATA

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_is_accessible_in_light_and_dark_and_on_a_phone(tmp_path: Path) -> None:
    report = tmp_path / "replay.html"
    policies = ("--policy", "round_robin", "--policy", "least_loaded")
    trace = DATA / "AzureLLMInferenceTrace_code.csv"
    assert run("replay", trace, "--config", CONFIG / "pool.yaml", *policies, "--report", report)[0] == 0
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        troubles: list[str] = []
        for width, scheme in ((1200, "light"), (390, "dark")):
            # axe runs in the page, which the page's own policy forbids.
            context = browser.new_context(
                viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True, bypass_csp=True
            )
            page = context.new_page()
            page.on("console", lambda message: troubles.append(message.text))
            page.on("requestfailed", lambda request: troubles.append(request.url))
            page.goto(report.as_uri())
            for folded in page.locator("details").all():
                folded.evaluate("one => one.open = true")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            found = axe.Axe().run(page, options=RULES).response["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
            assert troubles == []
        browser.close()
