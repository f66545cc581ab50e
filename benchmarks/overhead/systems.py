"""The systems under test: ours in several settings, and peers where they are installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_POOL = """
server: {{port: {port}}}
models:
  m:
    policy: {{name: {policy}}}
    backends:
{backends}
"""
_KEYS = "keys: [{name: bench, key: sk-bench, requests_per_minute: 100000000}]\n"
_NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000000; location / {{
    proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    client_body_buffer_size 2m; }} }}
}}
"""


@dataclass(frozen=True, slots=True)
class System:
    """A proxy that can be started.

    Parameters
    ----------
    argv
        From its port, the upstream's port and a folder of its own to its command line; None if it is not installed.
    headers
        What its requests must carry.
    """

    name: str
    argv: Callable[[int, int, Path], list[str] | None]
    headers: tuple[str, ...] = ()


def _gateway(policy: str, backends: int, *, keys: bool = False) -> Callable[[int, int, Path], list[str] | None]:
    def argv(port: int, upstream: int, folder: Path) -> list[str]:
        # One upstream under several addresses: 127.0.0.1, 127.0.0.2, ... are all this machine.
        lines = [f'      b{n}: {{method: baseline, url: "http://127.0.0.{n + 1}:{upstream}"}}' for n in range(backends)]
        text = _POOL.format(port=port, policy=policy, backends="\n".join(lines))
        config = folder / "pool.yaml"
        config.write_text(text + (_KEYS if keys else ""))
        return [sys.executable, "-m", "gateway", "--config", str(config)]

    return argv


def _nginx(port: int, upstream: int, folder: Path) -> list[str] | None:
    if shutil.which("nginx") is None:
        return None
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(port=port, upstream=upstream, folder=folder))
    return ["nginx", "-c", str(config), "-e", str(folder / "error.log")]


def _vllm_router(port: int, upstream: int, _folder: Path) -> list[str] | None:
    command = shutil.which("vllm-router")
    if command is None:
        return None
    return [
        *(command, "--worker-urls", f"http://127.0.0.1:{upstream}", "--port", str(port), "--host", "127.0.0.1"),
        *("--policy", "round_robin", "--log-level", "error"),
    ]


SYSTEMS = (
    System("gateway, round_robin, 1 backend", _gateway("round_robin", 1)),
    System(
        "gateway, thresholds, 8 backends, keys",
        _gateway("thresholds", 8, keys=True),
        ("authorization: Bearer sk-bench",),
    ),
    System("nginx", _nginx),
    System("vllm-router", _vllm_router),
)
