"""Real Redis behind TLS, behind Sentinels, and as a Cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis import Redis, RedisError

from backends.launch.ports import free_port
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waiting import eventually_blocking

SLOTS = 16384
MASTER = "the-master"


@contextlib.contextmanager
def tls_redis(password: str) -> Iterator[tuple[str, Path]]:
    """Yield the address of a Redis that speaks TLS only, and the certificate that it has signed itself."""
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        subprocess.run(
            [*command.split(), "-addext", names, "-keyout", str(key), "-out", str(certificate)],
            check=True,
            capture_output=True,
        )
        port = free_port()
        files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
        # Its plain port is for `RedisServer` only, which waits for it.
        with redis_server("--tls-port", str(port), *files) as server:
            server.client.config_set("requirepass", password)
            yield f"127.0.0.1:{port}", certificate


class Sentinels:
    """A master, a replica of it, and three sentinels that watch them."""

    def __init__(self, master: RedisServer, replica: RedisServer, ports: list[int], master_name: str) -> None:
        self.master = master
        self.replica = replica
        self._clients: list[Any] = [Redis(port=port, socket_timeout=5.0) for port in ports]
        self.url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + f"/{master_name}/0"

    def know_each_other(self) -> bool:
        """Return whether all sentinels know the replica and the other sentinels."""
        with contextlib.suppress(RedisError):
            return all(
                client.sentinel_master(MASTER)["num-other-sentinels"] == 2
                and client.sentinel_master(MASTER)["num-slaves"] == 1
                for client in self._clients
            )
        return False

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.contextmanager
def sentinel_redis() -> Iterator[Sentinels]:
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(redis_server())
        replica = stack.enter_context(redis_server("--replicaof", f"127.0.0.1 {master.port}"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(3)]
        for port in ports:
            file = folder / f"{port}.conf"
            file.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor {MASTER} 127.0.0.1 {master.port} 2\n"
                f"sentinel down-after-milliseconds {MASTER} 500\nsentinel failover-timeout {MASTER} 2000\n"
            )
            process = subprocess.Popen(
                ["redis-server", str(file), "--sentinel"], stdout=subprocess.DEVNULL, start_new_session=True
            )
            stack.callback(_kill, process)
        sentinels = Sentinels(master, replica, ports, MASTER)
        stack.callback(sentinels.close)
        eventually_blocking(sentinels.know_each_other, what="the sentinels know each other")
        yield sentinels


def _kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10.0)


class Cluster:
    """A Cluster of three masters."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.servers = servers
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers[:2])
        bounds = [SLOTS * number // len(servers) for number in range(len(servers) + 1)]
        for server, first, end in zip(servers, bounds, bounds[1:], strict=False):
            server.client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        for server, bus_port in ((server, _bus_port(server)) for server in servers[1:]):
            servers[0].client.execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus_port)
        eventually_blocking(lambda: all(self._is_ready(server) for server in servers), what="the cluster is ready")

    def _is_ready(self, server: RedisServer) -> bool:
        state = server.client.execute_command("CLUSTER INFO")
        return bool(state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == len(self.servers))

    def holder_of(self, key: str) -> RedisServer:
        """Return the server that holds a key."""
        (holder,) = (server for server in self.servers if key.encode() in server.client.keys("*"))
        return holder

    def keys(self) -> list[bytes]:
        return [key for server in self.servers for key in server.client.keys("*")]

    def move(self, key: str, source: RedisServer, target: RedisServer) -> None:
        """Move a key's slot, with all keys in it, to another server."""
        slot = source.client.execute_command("CLUSTER KEYSLOT", key)
        names = {server.port: server.client.execute_command("CLUSTER MYID") for server in (source, target)}
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source.port])
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target.port])
        keys = source.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000)
        source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for server in (target, source, *self.servers):
            server.client.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target.port])


def _bus_port(server: RedisServer) -> int:
    return int(server.client.config_get("cluster-port")["cluster-port"])


@contextlib.contextmanager
def cluster_redis() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port"]
        yield Cluster([stack.enter_context(redis_server(*options, str(free_port()))) for _ in range(3)])
