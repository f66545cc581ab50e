"""A gateway with two workers: any of them shows what both have counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.rooms.dashboard.conftest import SNAPSHOT
from tests.support.command import ADMIN_KEY, gateway_command, until
from tests.support.upstream import upstreams_in_thread

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
        with gateway_command(path, tmp_path) as command, httpx.Client(limits=each_alone, trust_env=False) as client:
            ready = f"{command.url}/readyz"
            until(lambda: all(client.get(ready).status_code == 200 for _ in range(8)), what="both are ready")

            def shown() -> dict[int, Any]:
                answers = [client.get(command.url + SNAPSHOT, headers=command.admin).json() for _ in range(8)]
                return {answer["process"]["pid"]: answer for answer in answers}

            until(lambda: len(shown()) == 2 and all(each["points_at_s"] for each in shown().values()))
            for _ in range(REQUESTS):
                assert client.post(f"{command.url}/v1/chat/completions", json=CHAT).status_code == 200

            def counts() -> list[int]:
                backends = [each["models"][0]["backends"] for each in shown().values()]
                return [sum((backend["ttft"] or {"count": 0})["count"] for backend in each) for each in backends]

            until(lambda: counts() == [REQUESTS, REQUESTS], what="both show all requests")
            for each in shown().values():
                assert each["process"]["workers"] == 2
                assert [backend["share"] for backend in each["models"][0]["backends"]] == [
                    pytest.approx(0.5, abs=0.1)
                ] * 2
            assert command.end() == 0
