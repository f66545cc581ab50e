"""Running the gateway's command with a pool file made for a measurement."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from backends.launch.ports import free_port
from benchmarks.vllm_cpu.engines import POOL

ROOT = POOL.parents[2]
_STOP_S = 60.0
_EVERY_S = 0.1


@contextlib.contextmanager
def serving(
    document: Mapping[str, Any],
    config: Path,
    is_ready: Callable[[str], bool],
    start_s: float,
    before: Sequence[str] = (),
) -> Iterator[str]:
    """Start the gateway, yield its URL when it is ready, and stop it at the end.

    Parameters
    ----------
    document
        Pool file.
    config
        Path to write it to; the log is written beside it.
    is_ready
        Function that is polled with the URL; errors of httpx count as not ready.
    before
        Words to put before the command.

    Raises
    ------
    RuntimeError
        If the gateway exits or is not ready in time; the message has its log.
    """
    config.write_text(json.dumps(document), encoding="utf-8")
    port, log_path = free_port(), config.with_suffix(".log")
    command = [*before, str(Path(sys.executable).with_name("gateway")), "--config", str(config), "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        end_s = time.monotonic() + start_s
        while not _is_ready(is_ready, url):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the gateway is not ready:\n{log_path.read_text(encoding='utf-8')}")
            time.sleep(_EVERY_S)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_S)


def _is_ready(is_ready: Callable[[str], bool], url: str) -> bool:
    try:
        return is_ready(url)
    except httpx.HTTPError:
        return False
