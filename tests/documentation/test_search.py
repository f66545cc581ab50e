"""The site builds without a warning, and in Chromium its search leads readers to the page that answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.support.deploy_tools import tool
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@dataclass
class Site:
    """The built site in a browser."""

    url: str
    page: Page

    def found(self, words: str) -> list[str]:
        """Return the addresses that a search finds, the first one first."""
        self.page.goto(f"{self.url}/search.html?q={words}")
        self.page.get_by_text("Search finished, found").wait_for()
        links = self.page.locator("#search-results li a")
        return [str(each.get_attribute("href")) for each in links.all()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([ROOT / "scripts/docs-site", folder / "html"], check=True, stdout=subprocess.DEVNULL, timeout=300)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox", "--disable-gpu"])
        yield Site((folder / "html").as_uri(), browser.new_page())
        browser.close()


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("429", "docs/configuration.html#rate-limits"),
        ("rate limit", "docs/configuration.html#rate-limits"),
        ("upgrade", "docs/upgrade.html#upgrade-and-roll-back"),
        ("install", "deploy/README.html#install"),
        ("503", "docs/runbook.html#by-symptom"),
        ("LiteLLM", "docs/compared.html#how-it-compares-with-other-routers"),
    ],
)
def test_the_section_that_answers_comes_first(site: Site, words: str, address: str) -> None:
    first = site.found(words)[0]
    page, _, section = address.partition("#")
    assert first.partition("#")[0] == page
    site.page.goto(f"{site.url}/{first}")
    at = site.page.locator(f"[id='{first.partition('#')[2]}']")  # what is first below the heading
    assert at.evaluate("element => element.closest('section').id") == section


@pytest.mark.parametrize("words", ["upgrade", "reload", "strikes", "Decisions", "scores of policies"])
def test_what_tells_of_the_past_is_not_found(site: Site, words: str) -> None:
    assert not [address for address in site.found(words) if "decisions/" in address or "CHANGELOG" in address]
