"""This project's own picker, which is tested where no `--target` is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.command import Command, gateway_command, until
from tests.support.waiting import TIMEOUT_S

from .target import Target

MODEL, EMPTY_MODEL = "llama-3.1-8b", "nobody"
LARGEST_MIB = 1
POOL = f"""
server: {{port: 0, max_body_mib: {LARGEST_MIB}}}
picker: {{listen: '127.0.0.1:0'}}
models:
  {MODEL}:
    policy: {{name: learned}}
    backends:
      plain: {{method: baseline, simulate: {{calibration: llama-3.1-8b-h100}}}}
      tree: {{method: suffix, simulate: {{calibration: llama-3.1-8b-h100}}}}
      other: {{method: suffix, simulate: {{calibration: llama-3.1-8b-h100}}}}
  {EMPTY_MODEL}:
    policy: {{name: round_robin}}
    backends:
      gone: {{method: baseline, url: 'http://127.0.0.1:1'}}
keys:
  - {{name: suite, key: suite-key}}
  - {{name: limited, key: limited-key, requests_per_minute: 1}}
admin: {{key: "${{GATEWAY_ADMIN_KEY}}"}}
state: none
"""


@contextlib.contextmanager
def own_picker(folder: Path) -> Iterator[Target]:
    """Run `gateway picker` over simulated replicas, with a second model whose only replica is down."""
    config = folder / "pool.yaml"
    config.write_text(POOL)
    with gateway_command(config, folder, "picker") as command:
        picker = address(command)
        target = Target(
            picker,
            MODEL,
            endpoints=endpoints(command),
            headers=(("authorization", "Bearer suite-key"), ("x-gateway-model", MODEL)),
            empty=(picker, EMPTY_MODEL),
            shed_headers=(("authorization", "Bearer limited-key"),),
            max_body_bytes=LARGEST_MIB * 2**20,
            limit_s=TIMEOUT_S / 3,
        )
        until(lambda: target.check("readiness") == "SERVING", what="a picker that is ready")
        yield target


def address(command: Command) -> str:
    """Return where the picker listens, as `host:port`."""
    until(lambda: command.process.poll() is not None or "grpc://" in command.printed(), what="the picker")
    assert command.process.poll() is None, command.printed()
    return command.printed().partition("grpc://")[2].split()[0]


def endpoints(command: Command) -> tuple[str, ...]:
    """Wait until all replicas are up, and return their endpoints."""

    def replicas() -> list[dict[str, str]]:
        models = command.get("/admin/pool", headers=command.admin).json()["models"]
        return list(models[MODEL]["backends"].values())

    until(lambda: all(replica["state"] == "up" for replica in replicas()), what="the replicas")
    return tuple(urlsplit(replica["url"]).netloc for replica in replicas())
