"""A page in Chromium that calls the gateway, another origin, with `fetch`.

The browser asks for permission first (a preflight request), and hides each answer without `access-control-allow-origin`
from the page, errors included.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.clients.report import KEY, MODEL, UNKNOWN_MODEL, URL, WRONG_KEY

PAGE_PORT = int(os.environ["CLIENTS_PAGE_PORT"])
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
CALL = """
const [url, key, body, done] = arguments;
(async () => {
  const headers = { authorization: `Bearer ${key}` };
  if (body !== null) headers["content-type"] = "application/json";
  const options = body === null ? { headers } : { method: "POST", headers, body };
  try {
    const answer = await fetch(url, options);
    const reader = answer.body.getReader();
    const decoder = new TextDecoder();
    let text = "", pieces = 0;
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      text += decoder.decode(piece.value, { stream: true });
      pieces += 1;
    }
    done({ status: answer.status, text, pieces });
  } catch (error) {
    done({ error: String(error) });
  }
})();
"""


class Page(SimpleHTTPRequestHandler):
    """Serves an empty page, quietly."""

    def do_GET(self) -> None:
        body = b"<!doctype html><title>page</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def chat(model: str = MODEL, *, stream: bool = False) -> str:
    messages = [{"role": "user", "content": "Tell me about sequence types."}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 60, "stream": stream})


def checked(answer: dict[str, Any], status: int, contains: str, pieces: int = 1) -> str | None:
    """Return what is wrong with an answer, if anything is."""
    as_expected = answer.get("status") == status and contains in answer["text"] and answer["pieces"] >= pieces
    return None if as_expected else f"unexpected: {answer}"


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", PAGE_PORT), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ["CLIENTS_CHROMIUM"]
    with tempfile.TemporaryDirectory() as folder:
        for flag in (*FLAGS, f"--user-data-dir={Path(folder)}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(os.environ["CLIENTS_CHROMEDRIVER"]))
        try:
            print(json.dumps({"version": driver.capabilities["browserVersion"]}), flush=True)
            driver.set_script_timeout(60)
            driver.get(f"http://127.0.0.1:{PAGE_PORT}/")
            call = partial(driver.execute_async_script, CALL)
            url, completions = f"{URL}/v1/models", f"{URL}/v1/chat/completions"
            for name, wrong in (
                ("models", lambda: checked(call(url, KEY, None), 200, MODEL)),
                ("chat", lambda: checked(call(completions, KEY, chat()), 200, '"content"')),
                ("stream", lambda: checked(call(completions, KEY, chat(stream=True)), 200, "[DONE]", pieces=3)),
                ("unknown model", lambda: checked(call(completions, KEY, chat(UNKNOWN_MODEL)), 404, UNKNOWN_MODEL)),
                ("wrong key", lambda: checked(call(completions, WRONG_KEY, chat()), 401, "error")),
            ):
                print(json.dumps({"case": name, "error": wrong()}), flush=True)
        finally:
            driver.quit()
            server.shutdown()


main()
