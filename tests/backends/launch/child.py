"""A process that misbehaves as an engine may, with a `/health`; a script for the tests of the launcher."""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()


def chatter() -> None:
    pause = threading.Event()
    for number in itertools.count():
        print(f"line {number} " + 200 * "x", flush=True)
        pause.wait(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--family", action="store_true", help="start a child, and leave an orphan")
    parser.add_argument("--fail", action="store_true", help="exit at once with status 3")
    parser.add_argument("--share", metavar="NAME", help="create shared memory of this name")
    parser.add_argument("--chatter", action="store_true", help="print without end")
    options = parser.parse_args()
    print("engine says", os.environ.get("ENGINE_WORD"), flush=True)
    if options.fail:
        sys.exit(3)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (print("engine ends", flush=True), os._exit(0)))
    if options.family:
        sleep = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
        subprocess.Popen(sleep)
        orphan = f"import subprocess; subprocess.Popen({sleep!r})"
        subprocess.run([sys.executable, "-c", orphan], check=True)
    if options.share:
        shared = SharedMemory(options.share, create=True, size=4096)
        print("shares", shared.name, flush=True)
    if options.chatter:
        threading.Thread(target=chatter, daemon=True).start()
    if options.port:
        HTTPServer(("127.0.0.1", options.port), Health).serve_forever()
    while True:  # runs, but is never ready
        signal.pause()


if __name__ == "__main__":
    main()
