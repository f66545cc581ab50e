"""Pictures of the dashboard under the load of the demo: take_screenshots.py FOLDER."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
OPEN_AT_S = 45.0
"""The page is open for a while before: the gateway samples decisions only while one is open."""
TAKEN_AT_S = 237.0


def main(folder: Path) -> None:
    """Run the demo, and take the pictures at the end of its fourth minute."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("This needs Debian's chromium: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gateway", "demo", "--phases", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo, sync_playwright() as playwright:  # noqa: S603
        try:
            url = _url_of(demo)
            start_s = time.monotonic()
            time.sleep(OPEN_AT_S)
            browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
            page = browser.new_page(viewport={"width": 1440, "height": 1180}, color_scheme="light")
            page.goto(url)
            page.locator("#pool-table tbody tr").first.wait_for()
            page.wait_for_timeout(1e3 * (TAKEN_AT_S - (time.monotonic() - start_s)))
            page.screenshot(path=folder / "dashboard-light.png")
            page.locator("#decisions-table .more").nth(2).click()
            page.locator(".bar").evaluate("bar => { bar.style.position = 'static'; }")  # else it covers the panel
            page.locator("#decisions").screenshot(path=folder / "dashboard-decisions.png")
            browser.close()
        finally:
            demo.send_signal(signal.SIGINT)


def _url_of(demo: subprocess.Popen[str]) -> str:
    for line in demo.stdout or ():
        if match := re.match(r"Open (\S+)", line):
            return match[1]
    raise SystemExit("The demo did not start.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
