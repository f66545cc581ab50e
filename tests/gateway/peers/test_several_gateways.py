"""Two gateways as processes of their own, one of them with two workers, that serve the same pool through one Redis."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ADMIN_KEY, Command, gateway_command, until, until_ready
from tests.support.pool_file import CHAT, write_pool
from tests.support.redis_server import redis_server
from tests.support.upstream import Wire, upstreams_in_thread, well

KEY = {"authorization": "Bearer sk-plain"}
KEYS = [
    {"name": "plain", "key": "sk-plain", "may_override": True},
    {"name": "slow", "key": "sk-slow", "requests_per_minute": 6},
]


async def hold(wire: Wire) -> None:
    """Answer at once, but not requests that ask to be held."""
    if b"hold" in wire.seen.body:
        await wire.until_closed()
    else:
        await well(wire)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Path]:
    with upstreams_in_thread("ab", "m", hold) as upstreams, redis_server() as redis:
        yield write_pool(
            tmp_path / "pool.yaml",
            {each.name: each.url for each in upstreams},
            policy="lmetric",
            health={"interval_s": 0.2},
            state={"redis": redis.url},
            keys=KEYS,
            admin={"key": ADMIN_KEY},
        )


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def send_held(command: Command) -> socket.socket:
    """Send a request that is not answered, to replica a."""
    port = int(command.url.rpartition(":")[2])
    body = json.dumps(chat("hold")).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-plain\r\nx-gateway-backend: a\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


def others(command: Command, backend: str) -> int:
    document = command.get("/admin/pool", headers=command.admin).json()
    return int(document["models"]["m"]["backends"][backend]["others"])


@pytest.mark.slow
def test_two_gateways_act_as_one_until_one_is_killed(pool: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()

    def chosen(text: str) -> str:
        """Return where the second gateway would send a prompt."""
        answer = two.post("/admin/explain", chat(text), headers=two.admin)
        return str(answer.json()["choice"]["backend"])

    with (
        gateway_command(pool, folders[0], "--workers", "2") as one,
        gateway_command(pool, folders[1]) as two,
    ):
        until(lambda: "gateway_peers 2.0" in two.get("/metrics").text, what="both workers of the other are known")
        chosen("what makes it know the replicas")
        for number, warm in enumerate("ab"):
            text = f"Conversation {number}. " * 100
            there = one.post("/v1/chat/completions", chat(text), headers=KEY | {"x-gateway-backend": warm})
            assert there.status_code == 200
            until(lambda text=text, warm=warm: [chosen(text) for _ in range(8)] == [warm] * 8)
        held = [send_held(one) for _ in range(3)]
        until(lambda: others(two, "a") == 3)
        answers = [two.post("/v1/chat/completions", CHAT, headers=KEY) for _ in range(4)]
        assert {answer.headers["x-gateway-backend"] for answer in answers} == {"b"}, "a is busy with requests of one"
        slow = {"authorization": "Bearer sk-slow"}
        statuses: list[int] = []

        def refused_by_both() -> bool:
            last = [each.post("/v1/chat/completions", CHAT, headers=slow).status_code for each in (one, two) * 3]
            statuses.extend(last)
            return set(last) == {429} and statuses.count(200) >= 6

        until(refused_by_both)
        assert statuses.count(200) <= 9, "6, or one more for each process"
        said = two.post("/admin/drain", {"model": "m", "backend": "a"}, headers=two.admin).json()
        assert (said["in_flight"], said["others"]) == (0, 3)
        os.killpg(one.process.pid, signal.SIGKILL)
        until(lambda: others(two, "a") == 0, what="the requests of the killed gateway are forgotten")
        until(lambda: "gateway_peers 0.0" in two.get("/metrics").text)
        for connection in held:
            connection.close()


@pytest.mark.slow
def test_workers_drain_together_while_redis_is_away(tmp_path: Path) -> None:
    with upstreams_in_thread("ab", "m", hold) as (a, b), redis_server() as redis:
        pool = write_pool(
            tmp_path / "pool.yaml",
            {"a": a.url, "b": b.url},
            state={"redis": redis.url},
            health={"interval_s": 0.2},
            admin={"key": ADMIN_KEY},
        )
        with gateway_command(pool, tmp_path, "--workers", "2") as gateway:
            until_ready(gateway)
            redis.kill()
            until(lambda: gateway.printed().count("this gateway goes by its own counts until then") == 1)
            gateway.post("/admin/drain", {"model": "m", "backend": "a"}, headers=gateway.admin)

            def states() -> set[str]:
                """Return the states of the replica in whichever workers answer."""
                pools = [gateway.get("/admin/pool", headers=gateway.admin).json() for _ in range(12)]
                return {each["models"]["m"]["backends"]["a"]["state"] for each in pools}

            until(lambda: states() == {"draining"}, what="both workers have drained it")
