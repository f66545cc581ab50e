"""Files that do not answer, at the start and while requests are served."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.gateway.listening.test_tls import Served
from tests.support.certificates import copied, make_pair
from tests.support.command import gateway_command, until
from tests.support.hung_mount import hung_mount
from tests.support.pool_file import CHAT
from tests.support.upstream import upstreams_in_thread

POOL = """
server: {{tls: {{certificate: "{files}/tls.crt", key: "{files}/tls.key"}}, watch: true, drain_s: 2}}
health: {{interval_s: 0.2}}
state: {{file: "{files}/state.sqlite"}}
recorder: {{path: "{files}/traces", flush_s: 0.1}}
models:
  m: {{policy: {{name: learned}}, backends: {{a: {{method: baseline, url: "{url}"}}}}}}
"""
LONGEST_S = 1.0
"""For a handshake and an answer on a busy machine; a gateway that waits for a file takes for ever."""
END_S = 30.0


def asks_in_time(gateway: Served) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        began_s = time.monotonic()
        assert gateway.asks(path=path)[0] == 200
        assert time.monotonic() - began_s < LONGEST_S
    assert gateway.asks("POST", "/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.slow
def test_files_that_no_longer_answer_hold_up_no_request_and_no_end(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair")
    good, files = tmp_path / "good", tmp_path / "files"
    good.mkdir()
    copied(pair, good)
    files.symlink_to(good)
    with upstreams_in_thread("a", "m") as (upstream,), hung_mount(tmp_path / "hung") as hung:
        pool = good / "pool.yaml"
        pool.write_text(POOL.format(files=files, url=upstream.url))
        with gateway_command(files / "pool.yaml", tmp_path) as command:
            gateway = Served(int(command.url.rpartition(":")[2]), pair)
            until(lambda: gateway.asks("POST", "/v1/chat/completions", CHAT)[0] == 200)
            until(lambda: [*good.glob("traces/*")] and (good / "state.sqlite").exists())
            (tmp_path / "other").symlink_to(hung)
            (tmp_path / "other").replace(files)
            for _ in range(5):
                asks_in_time(gateway)
            began_s = time.monotonic()
            assert command.end() == 0
            assert time.monotonic() - began_s < END_S
            assert "Traceback" not in command.printed()
            assert "which hang" in command.printed()
