"""A gateway with two workers: any of them shows what both have counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.rooms.dashboard.conftest import SNAPSHOT
from tests.support.command import ADMIN_KEY, gateway_command, until, until_ready
from tests.support.upstream import upstreams_in_thread
from tests.support.waiting import TIMEOUT_S

POOL = """
server: {{workers: 2}}
health: {{interval_s: 0.2}}
models:
  m:
    policy: {{name: round_robin}}
    backends:
      a: {{method: baseline, url: "{a}"}}
      b: {{method: baseline, url: "{b}"}}
admin: {{key: "{admin}"}}
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
REQUESTS = 24


@pytest.mark.slow
def test_each_worker_shows_the_counts_of_all(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    with upstreams_in_thread("ab", "m") as (a, b):
        path.write_text(POOL.format(a=a.url, b=b.url, admin=ADMIN_KEY))
        each_alone = httpx.Limits(max_keepalive_connections=0)  # so that any worker may answer
        asking = httpx.Client(limits=each_alone, timeout=TIMEOUT_S, trust_env=False)
        with gateway_command(path, tmp_path) as command, asking as client:
            until_ready(command)

            def shown() -> list[Any]:
                """Return what each worker shows: which of them answers is chance, so both are met in three answers."""
                found: dict[int, Any] = {}
                for _ in range(64):
                    answer = client.get(command.url + SNAPSHOT, headers=command.admin).json()
                    found[answer["process"]["pid"]] = answer
                    if len(found) == 2:
                        break
                return [*found.values()]

            until(lambda: all(each["points_at_s"] for each in shown()), what="both have counted from 0")
            for _ in range(REQUESTS):
                assert client.post(f"{command.url}/v1/chat/completions", json=CHAT).status_code == 200
            last: list[Any] = []

            def all_are_shown() -> bool:
                last[:] = shown()
                backends = [each["models"][0]["backends"] for each in last]
                return [sum((each["ttft"] or {"count": 0})["count"] for each in both) for both in backends] == [
                    REQUESTS
                ] * 2

            until(all_are_shown, what="both show all requests")
            for each in last:
                assert each["process"]["workers"] == 2
                assert [backend["share"] for backend in each["models"][0]["backends"]] == [
                    pytest.approx(0.5, abs=0.1)
                ] * 2
            assert command.end() == 0
