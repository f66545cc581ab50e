"""The systems under attack: this gateway and the peers.

Each has a key where it knows keys, and what its documentation offers against such attacks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from backends.launch.ports import free_port
from benchmarks.overhead.systems import Argv, System, gateway

KEY = "sk-bench"
REPLICAS = tuple(f"127.0.0.{number}" for number in range(1, 5))
POOL = Path(__file__).with_name("pools") / "attacked.yaml"
_NGINX = """
{user}worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_rlimit_nofile 20000;
events {{ worker_connections 15000; }}
http {{
  access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_header_timeout 10s; client_body_timeout 10s; send_timeout 10s; reset_timedout_connection on;
  upstream up {{ {servers} keepalive 64; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    if ($http_authorization != "Bearer {key}") {{ return 401; }}
    proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_next_upstream error timeout invalid_header non_idempotent; }} }}
}}
"""
_LITELLM = """
model_list:
{models}
general_settings: {{master_key: {key}}}
litellm_settings: {{num_retries: 1, request_timeout: 120}}
"""
_LITELLM_MODEL = (
    "  - {{model_name: m, litellm_params: "
    "{{model: hosted_vllm/m, api_base: 'http://{host}:{port}/v1', api_key: none}}}}"
)
HARDENING = {
    "gateway": "none: its defaults",
    "nginx": "client_header_timeout, client_body_timeout, send_timeout 10s; reset_timedout_connection; "
    "client_max_body_size 64m",
    "vllm-router": "--max-payload-size 67108864 --request-timeout-secs 120; has no keys for clients",
    "sglang-router": "--max-payload-size 67108864 --request-timeout-secs 120",
    "litellm": "--keepalive_timeout 5 --limit_concurrency 12000",
}
"""By the name of a system, what was set against attacks."""


def _nginx(port: int, upstream: int, folder: Path) -> list[str] | None:
    if shutil.which("nginx") is None:
        return None
    servers = " ".join(f"server {host}:{upstream};" for host in REPLICAS)
    config = folder / "nginx.conf"
    user = "" if os.geteuid() else "user root; "  # else its workers may not write to the folder
    config.write_text(_NGINX.format(port=port, servers=servers, folder=folder, key=KEY, user=user))
    return ["nginx", "-c", str(config), "-e", str(folder / "error.log")]


def _router(command: str, *options: str, error: str = "error") -> Argv:
    def argv(port: int, upstream: int, _folder: Path) -> list[str] | None:
        if shutil.which(command) is None:
            return None
        urls = [f"http://{host}:{upstream}" for host in REPLICAS]
        where = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
        where += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--log-level", error]
        return [command, *options, *where, "--max-payload-size", str(64 << 20), "--request-timeout-secs", "120"]

    return argv


def _litellm(port: int, upstream: int, folder: Path) -> list[str] | None:
    if shutil.which("litellm") is None:
        return None
    config = folder / "litellm.yaml"
    models = "\n".join(_LITELLM_MODEL.format(host=host, port=upstream) for host in REPLICAS)
    config.write_text(_LITELLM.format(models=models, key=KEY))
    options = ["--telemetry", "False", "--keepalive_timeout", "5", "--limit_concurrency", "12000"]
    return ["litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port), *options]


def systems(build: str = "") -> list[System]:
    """Return the gateway and the peers.

    Parameters
    ----------
    build
        `NAME=COMMAND` of an installed gateway; empty takes `gateway` in PATH, else this checkout.
    """
    key = (f"authorization: Bearer {KEY}",)
    own = gateway(POOL, build=build)
    return [
        System("gateway", own.argv, key),
        System("nginx", _nginx, key),
        System("vllm-router", _router("vllm-router"), key),
        System("sglang-router", _router("sglang-router", "launch", "--api-key", KEY), key),
        System("litellm", _litellm, key),
    ]
