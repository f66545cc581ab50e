"""The page at `/dashboard` in Chromium, of a gateway under load."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.dashboard_page.conftest import WAIT_MS, Served, Watched
from tests.support.command import ADMIN_KEY

pytestmark = pytest.mark.slow
expect.set_options(timeout=WAIT_MS)

LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


def violations(page: Page) -> list[tuple[str, list[str]]]:
    """Return the rules of WCAG 2.1 A and AA that a page breaks, with the elements."""
    options: dict[str, Any] = {"runOnly": {"type": "tag", "values": LEVELS}, "resultTypes": ["violations"]}
    found = Axe().run(page, options=options).response["violations"]
    return [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in found]


def test_a_wrong_key_is_refused_and_the_right_one_opens_the_page(watched: Watched, served: Served) -> None:
    watched.allowed = ("401",)
    page = watched.page
    page.goto(f"{served.url}/dashboard")
    expect(page.get_by_role("dialog", name="Admin key")).to_be_visible()
    assert violations(page) == []
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This key is not accepted.")
    expect(page.locator("main")).to_be_hidden()
    page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Pool")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Pool")).to_be_visible()  # the tab keeps the key
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_role("dialog")).to_be_visible()


def test_figures_follow_the_traffic(page: Page) -> None:
    assert "key" not in page.url
    expect(page.locator("#well-verdict")).to_have_text("Yes: all 3 replicas are up.")
    expect(page.locator("#well-list")).to_contain_text("head: vLLM accepts drafts that the model would not write")
    expect(page.locator("#gain-verdict")).to_contain_text("plain balancing")
    expect(page.locator("#speculation-verdict")).to_contain_text("no speculation")
    expect(page.locator("#takes-verdict")).to_contain_text("%")
    expect(page.locator("#change-verdict")).to_have_text("Nothing, as far as was measured.")
    head = page.locator("#pool-table tbody tr", has_text="head")
    expect(head).to_contain_text("up")
    expect(head).to_contain_text(re.compile(r"\d+(\.\d)?%"))
    measured = page.locator("#latency-table tbody tr", has_text="tree").locator("td").last
    measured.filter(has_text=re.compile(r"[1-9]")).wait_for()
    figures = page.locator("#latency-table tbody")  # a single one may stay as it is
    before = figures.text_content() or ""
    expect(figures).not_to_have_text(before)
    chart = page.get_by_role("img", name=re.compile("TTFT, 95th percentile.*head"))
    said = str(chart.get_attribute("aria-label"))
    assert chart.locator("canvas").count() == 1
    expect(chart).not_to_have_attribute("aria-label", said)  # there was a new point
    page.get_by_role("button", name="Tables").click()
    expect(page.get_by_role("table", name="Requests in flight")).to_contain_text("tree")
    page.get_by_label("Model").select_option("other")
    expect(page.locator("#pool-table tbody tr")).to_have_count(1)
    expect(page.locator("#rules-about")).to_contain_text("least_loaded")
    page.get_by_label("5 min", exact=True).check()
    page.reload()
    expect(page.get_by_label("5 min", exact=True)).to_be_checked()
    expect(page.get_by_label("Model")).to_have_value("other")


def test_a_version_is_shown_pinned_and_unpinned_by_keyboard(page: Page) -> None:
    for version in (1, 2):
        page.get_by_role("button", name="Distill now").press("Enter")
        expect(page.get_by_role("button", name=f"Version {version}", exact=True)).to_be_visible()
    expect(page.locator("#rules-text")).to_contain_text("name: thresholds")
    page.get_by_role("button", name="Pin version 1").press("Enter")
    page.get_by_role("dialog", name="Pin version 1?").wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("#takes")).to_contain_text("learned decides.")
    page.get_by_role("button", name="Pin version 1").press("Enter")
    page.get_by_role("button", name="Pin", exact=True).press("Enter")
    expect(page.locator("#takes")).to_contain_text("rules, version 1 decides, in place of learned")
    expect(page.locator("#done")).to_have_text("Version 1 decides.")
    page.get_by_role("button", name="Unpin").press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Unpin").press("Enter")
    expect(page.locator("#rules-about")).to_contain_text("No version is pinned")


def test_backends_are_sorted_grouped_drained_and_resumed_by_keyboard(page: Page) -> None:
    names = page.locator("#pool-table tbody th")
    page.get_by_role("button", name="Backend", exact=True).press("Enter")
    expect(names).to_have_text([re.compile("^head"), re.compile("^plain"), re.compile("^tree")])
    page.get_by_role("button", name="Group by method").press("Enter")
    expect(names).to_have_count(6)
    expect(names.first).to_contain_text("eagle3: 1 backend,")
    page.reload()
    expect(names).to_have_count(6)
    row = page.locator("#pool-table tbody tr", has=page.get_by_role("button", name=re.compile("head$")))
    row.get_by_role("button", name="Drain head").press("Enter")
    page.get_by_role("dialog", name="Drain head?").get_by_role("button", name="Drain", exact=True).press("Enter")
    expect(page.locator("#done")).to_contain_text("head is draining")
    expect(page.locator("#well-verdict")).to_contain_text("2 of 3 replicas are up")
    row.get_by_role("button", name="Resume head").press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).press("Enter")
    expect(row.get_by_role("button", name="Drain head")).to_be_visible()


def test_no_rule_of_wcag_is_broken_in_light_in_the_dark_and_on_a_phone(page: Page) -> None:
    page.locator("#decisions-table .more").first.press("Enter")
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    page.locator("#model option").first.evaluate("model => { model.textContent += '-long'.repeat(40); }")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    named = page.locator("#decisions-table .named").first
    named.evaluate("name => { name.lastChild.textContent = '127.0.0.1:8101'; }")
    assert named.evaluate("name => name.offsetWidth <= name.parentNode.clientWidth"), "a name is cut"


def test_everything_can_be_reached_by_tab_and_shows_its_focus(page: Page) -> None:
    reached = set()
    for _ in range(110):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.id || e.textContent, e === document.body || s.outlineStyle !== 'none'] }"
        )
        assert seen[1], f"no visible focus: {seen[0]}"
        reached.add(seen[0].strip())
    assert {"Rules", "forget", "model", "tables", "distill", "reason", "pause"} <= reached


def test_it_is_not_well_where_a_class_is_late(watched: Watched, served: Served) -> None:
    snapshot = served.gateway.get("/admin/dashboard/snapshot", headers=served.gateway.admin).json()
    fine, late = ({"name": name, "requests": 200, "kept": kept} for name, kept in (("batch", 199), ("chat", 150)))
    model = snapshot["models"][0]
    model["classes"] = [fine, late]
    whole = {"ttft": None, "tpot": {"p50_s": 0.01, "p95_s": 0.01, "p99_s": 0.01, "count": 12}}  # no answer was streamed
    model["backends"] = [backend | {"state": "up", "reason": ""} | whole for backend in model["backends"]]
    page = watched.page
    page.route("**/admin/dashboard/snapshot", lambda route: route.fulfill(json=snapshot))
    page.goto(f"{served.url}/dashboard#key={ADMIN_KEY}")
    expect(page.locator("#well-verdict")).to_contain_text("but too many requests are late: chat.")
    expect(page.locator("#well-list")).to_contain_text("chat: 75% of 200 requests in time.")
    expect(page.locator("#latency-table")).to_contain_text("12 requests")


def test_it_is_not_well_where_other_models_are_down(watched: Watched, served: Served) -> None:
    snapshot = served.gateway.get("/admin/dashboard/snapshot", headers=served.gateway.admin).json()
    model, other = snapshot["models"]
    well = dict.fromkeys(("outlier", "contradiction", "difference", "silence", "trouble", "reason")) | {"state": "up"}
    model |= {"load": 0.0, "classes": [], "gain": None}
    model["backends"] = [backend | well | {"up": True} for backend in model["backends"]]
    down = other | {"backends": [backend | {"up": False, "state": "down"} for backend in other["backends"]]}
    snapshot["models"] = [model, *(down | {"name": f"m{number}"} for number in range(5))]
    page = watched.page
    page.route("**/admin/dashboard/snapshot", lambda route: route.fulfill(json=snapshot))
    page.goto(f"{served.url}/dashboard#key={ADMIN_KEY}")
    expect(page.locator("#well-verdict")).to_have_text("This model is, but 5 others have no replica that is up.")
    expect(page.locator("#well-list")).to_contain_text("No replica is up of m0, m1, m2, and 2 others.")


def test_text_of_others_is_never_parsed(watched: Watched, served: Served) -> None:
    evil = "<img src=x onerror=document.title='x'>"

    def poisoned(value: Any) -> Any:
        """Return a document whose texts all hold markup, different ones still being different."""
        if isinstance(value, dict):
            return {name: poisoned(each) for name, each in value.items()}
        if isinstance(value, list):
            return [poisoned(each) for each in value]
        return f"{value}{evil}" if isinstance(value, str) else value

    snapshot = served.gateway.get("/admin/dashboard/snapshot", headers=served.gateway.admin).json()
    document = poisoned(snapshot)
    gain = {"share": 0.1, "low": 0.05, "high": 0.2, "of": evil, "confidence": 0.95}
    finding = {"backend": evil, "title": evil, "gain": gain, "evidence": evil, "change": evil}
    speculation = {"gain": gain, "baseline": evil, "missing": evil}
    advised = {"learns": True, "speculation": speculation, "findings": [finding]}
    advice = {"models": {document["models"][0]["name"]: advised}}
    history = {"format": document["format"], "series": [], "at_s": [], "backends": []}
    watched.allowed = ("404",)  # no rules of a model of that name
    page = watched.page
    page.route("**/admin/dashboard/history", lambda route: route.fulfill(json=history))
    page.route("**/admin/dashboard/snapshot", lambda route: route.fulfill(json=document))
    page.route("**/admin/advice", lambda route: route.fulfill(json=advice))
    page.goto(f"{served.url}/dashboard#key={ADMIN_KEY}")
    expect(page.locator("#pool-table")).to_contain_text(f"tree{evil}")
    expect(page.locator("#change-verdict")).to_contain_text(evil)
    page.get_by_text("How, and why").press("Enter")
    expect(page.locator("#change-list pre")).to_have_text(evil)
    assert page.locator("main img").count() == 0
    assert page.title() == "Speculation gateway"


@pytest.mark.parametrize("by", ["itself", "the button"])
def test_the_page_tells_that_the_connection_is_lost_and_comes_back(
    watched: Watched, page: Page, served: Served, by: str
) -> None:
    watched.allowed = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
    if by == "the button":
        page.evaluate("window.setTimeout = () => 0")  # the next attempt never comes
    served.stop()
    expect(page.locator("#notice")).to_contain_text("The connection to the gateway is lost.")
    if by == "itself":
        expect(page.locator("#live")).to_contain_text("old")
        assert violations(page) == []
    served.start()
    if by == "the button":
        page.get_by_role("button", name="Try now").click()
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#live-text")).to_have_text("Live")
