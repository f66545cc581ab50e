"""Pictures of the dashboard under the load of the demo: take_screenshots.py FOLDER."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
PANELS = ("beliefs", "rules", "decisions")
OPEN_AT_S = 45.0
"""The pages are open for a while before: the gateway samples decisions only for open pages."""
TAKEN_AT_S = 237.0


def main(folder: Path) -> None:
    """Run the demo, and take the pictures at the end of its fourth minute."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("This needs Debian's chromium: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lab.demo", "--no-browse", "--phases", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo, sync_playwright() as playwright:  # noqa: S603
        try:
            url = _url_of(demo)
            start_s = time.monotonic()
            time.sleep(OPEN_AT_S)
            browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
            light, dark = (_open(browser, url, scheme, 1440, 1180) for scheme in ("light", "dark"))
            phone = _open(browser, url, "light", 360, 740)
            light.wait_for_timeout(1e3 * (TAKEN_AT_S - (time.monotonic() - start_s)))
            light.get_by_role("button", name="Version 4", exact=True).wait_for()  # of the fourth phase
            for name, page in (("light", light), ("dark", dark), ("phone", phone)):
                page.screenshot(path=folder / f"dashboard-{name}.png")
            light.locator("#decisions-table .more").nth(2).click()
            light.locator(".bar").evaluate("bar => { bar.style.position = 'static'; }")  # else it covers a panel
            for panel in PANELS:
                light.locator(f"#{panel}").screenshot(path=folder / f"dashboard-{panel}.png")
            browser.close()
        finally:
            demo.send_signal(signal.SIGINT)


def _url_of(demo: subprocess.Popen[str]) -> str:
    for line in demo.stdout or ():
        if match := re.match(r"Open (\S+)", line):
            return match[1]
    raise SystemExit("The demo did not start.")


def _open(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    """Open the page; a phone has two pixels for each of CSS."""
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if width < 720 else 1,
    )
    page.goto(url)
    page.locator("#pool-table tbody tr").first.wait_for()
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]))
