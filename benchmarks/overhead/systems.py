"""The systems under test: the gateway with each pool file of `pools/`, and the installed peers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backends.launch.ports import free_port

POOLS = Path(__file__).with_name("pools")
_NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 40000; }}
http {{
  access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000000; location / {{
    proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    client_body_buffer_size 2m; }} }}
}}
"""
_LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: hosted_vllm/m, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""

Argv = Callable[[int, int, Path], list[str] | None]


@dataclass(frozen=True, slots=True)
class System:
    """A proxy that can be started.

    Parameters
    ----------
    argv
        Function from its port, the upstream's port and a folder to its command line; None if it is not installed. The
        environment has UPSTREAM and FOLDER too.
    headers
        Headers that its requests must have.
    records
        Whether it records requests and counts those that it drops.
    """

    name: str
    argv: Argv
    headers: tuple[str, ...] = ()
    records: bool = False


def gateway(pool: Path, *, workers: int = 1, build: str = "") -> System:
    """Return the gateway with a pool file.

    Parameters
    ----------
    build
        `NAME=COMMAND` of an installed gateway; by default `gateway` in PATH, else this checkout, not compiled.
    """
    name, _, given = build.partition("=")

    def argv(port: int, _upstream: int, _folder: Path) -> list[str]:
        installed = given or shutil.which("gateway")
        command = [installed] if installed else [sys.executable, "-m", "gateway"]
        return [*command, "--config", str(pool), "--port", str(port), "--workers", str(workers)]

    label = f"gateway{' ' if name else ''}{name}, {pool.stem}"
    return System(label, argv, ("authorization: Bearer sk-bench",), "recorder:" in pool.read_text())


def _nginx(port: int, upstream: int, folder: Path) -> list[str] | None:
    if shutil.which("nginx") is None:
        return None
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(port=port, upstream=upstream, folder=folder))
    return ["nginx", "-c", str(config), "-e", str(folder / "error.log")]


def _router(command: str, *options: str) -> Argv:
    def argv(port: int, upstream: int, _folder: Path) -> list[str] | None:
        if shutil.which(command) is None:
            return None
        where = ["--worker-urls", f"http://127.0.0.1:{upstream}", "--host", "127.0.0.1", "--port", str(port)]
        where += ["--prometheus-port", str(free_port())]  # the default is the same for all
        return [command, *options, *where, "--policy", "round_robin", "--log-level", "error"]

    return argv


def _litellm(port: int, upstream: int, folder: Path) -> list[str] | None:
    if shutil.which("litellm") is None:
        return None
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM.format(upstream=upstream))
    return ["litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]


PEERS = (
    System("nginx", _nginx),
    System("vllm-router", _router("vllm-router")),
    System("sglang-router", _router("sglang-router", "launch")),
    System("litellm", _litellm),
)


def systems(pools: list[Path], builds: list[str]) -> list[System]:
    """Return each build of the gateway with the given pool files (else those of `pools/`), and the peers."""
    files = pools or sorted(POOLS.glob("*.yaml"))
    return [*(gateway(pool, build=build) for pool in files for build in builds or [""]), *PEERS]
