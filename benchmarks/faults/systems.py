"""The systems before the replicas: this gateway and its peers, each set up as its documentation says is best."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.launch.ports import free_port
from benchmarks.faults.asking import LINES, MODEL

HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 5))
LINE_HOSTS = tuple(f"127.0.0.{number}" for number in range(5, 7))
"""The replicas of the model that batches ask for."""
ADMIN_KEY = "faults-admin-key"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a system runs.

    Parameters
    ----------
    port, upstream_port
        Its port, and that of all replicas.
    folder, disk
        Folders for its files; `disk` is the one that gets full.
    redis
        URL of a Redis.
    """

    port: int
    upstream_port: int
    folder: Path
    disk: Path
    redis: str = ""

    @property
    def pool(self) -> Path:
        """Return the path of the gateway's pool file."""
        return self.folder / "pool.yaml"

    @property
    def urls(self) -> list[str]:
        """Return the addresses of the replicas."""
        return self.urls_of(HOSTS)

    def urls_of(self, hosts: Sequence[str]) -> list[str]:
        """Return the addresses of replicas on hosts."""
        return [f"http://{host}:{self.upstream_port}" for host in hosts]


@dataclass(frozen=True, slots=True)
class System:
    """A proxy that can be started.

    Parameters
    ----------
    argv
        Function from the site to the command line; None if it is not installed.
    settings
        What was set for its sake, in words.
    stops_with
        The signal after which it finishes what it has.
    reloads
        Whether it reads its configuration again at SIGHUP.
    has_state
        Whether it stores what it learns, and records requests.
    replicas
        Number of its replicas.
    """

    name: str
    argv: Callable[[Site], list[str] | None]
    settings: str = ""
    stops_with: signal.Signals = signal.SIGTERM
    reloads: bool = False
    has_state: bool = False
    replicas: int = len(HOSTS)


def _pool(site: Site, policy: str, *, rescue: bool, **more: Any) -> Path:
    """Write a pool file; JSON is YAML."""
    models = {
        name: {
            "policy": {"name": policy},
            "rescue": rescue,
            "backends": {
                f"b{number}": {"method": "baseline", "url": url} for number, url in enumerate(site.urls_of(hosts))
            },
        }
        for name, hosts in {MODEL: HOSTS, **({LINES: LINE_HOSTS} if "batches" in more else {})}.items()
    }
    pool = {"models": models, "admin": {"key": ADMIN_KEY}, **more}
    site.pool.write_text(json.dumps(pool, indent=1))
    return site.pool


def gateway(site: Site, policy: str, *, rescue: bool = True, **more: Any) -> list[str]:
    """Return the command of a gateway with a policy, and more sections of its pool file."""
    installed = shutil.which("gateway")
    command = [installed] if installed else [sys.executable, "-m", "gateway"]
    return [*command, "--config", str(_pool(site, policy, rescue=rescue, **more)), "--port", str(site.port)]


def _plain(site: Site) -> list[str]:
    return gateway(site, "least_loaded", state="none")


def _unrescued(site: Site) -> list[str]:
    return gateway(site, "least_loaded", rescue=False, state="none")


def _shared(site: Site) -> list[str]:
    batches = {"folder": str(site.disk / "batches")}
    return gateway(site, "learned", state={"redis": site.redis}, recorder=_recorder(site), batches=batches)


def _local(site: Site) -> list[str]:
    state = {"file": str(site.disk / "state.db")}
    return gateway(site, "learned", state=state, recorder=_recorder(site))


def _recorder(site: Site) -> dict[str, Any]:
    return {"path": str(site.disk / "records")}


_NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_rlimit_nofile 20000;
events {{ worker_connections 15000; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream up {{ least_conn; {servers} keepalive 64; }}
  server {{ listen 127.0.0.1:{port} backlog=2048; location / {{
    proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_connect_timeout 2s; proxy_read_timeout 60s;
    proxy_next_upstream error timeout invalid_header http_500 http_502 http_503 non_idempotent;
    proxy_next_upstream_tries 2; }} }}
}}
"""


def _nginx(site: Site) -> list[str] | None:
    if shutil.which("nginx") is None:
        return None
    servers = " ".join(f"server {url.removeprefix('http://')} max_fails=3 fail_timeout=2s;" for url in site.urls)
    config = site.folder / "nginx.conf"
    config.write_text(_NGINX.format(port=site.port, servers=servers, folder=site.folder))
    return ["nginx", "-c", str(config), "-e", str(site.folder / "error.log")]


_ROUTER = (
    "--health-check-interval-secs 2 --health-check-timeout-secs 2 --health-failure-threshold 2 "
    "--health-success-threshold 1 --retry-max-retries 2 --retry-initial-backoff-ms 20 --cb-failure-threshold 3 "
    "--cb-success-threshold 1 --cb-timeout-duration-secs 2 --request-timeout-secs 600"
)


def _router(command: str, *options: str) -> Callable[[Site], list[str] | None]:
    def argv(site: Site) -> list[str] | None:
        if shutil.which(command) is None:
            return None
        where = ["--worker-urls", *site.urls, "--host", "127.0.0.1", "--port", str(site.port)]
        where += ["--prometheus-port", str(free_port()), "--policy", "power_of_two", "--log-level", "error"]
        return [command, *options, *where, *_ROUTER.split()]

    return argv


_LITELLM_SETTINGS = "num_retries: 2, allowed_fails: 3, cooldown_time: 2, routing_strategy: least-busy, timeout: 600"


def _litellm(site: Site) -> list[str] | None:
    if shutil.which("litellm") is None:
        return None
    config = site.folder / "litellm.yaml"
    parameters = [{"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"} for url in site.urls]
    models = [{"model_name": MODEL, "litellm_params": each} for each in parameters]
    general = {"dangerously_permit_weak_or_unset_master_key": True}
    text = json.dumps({"model_list": models, "general_settings": general}, indent=1)
    config.write_text(text[:-2] + f',\n "router_settings": {{{_LITELLM_SETTINGS}}}\n}}\n')
    return ["litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(site.port), "--telemetry", "False"]


SYSTEMS = (
    System("gateway", _plain, "its defaults", reloads=True),
    System("gateway, no rescue", _unrescued, "`rescue: false`", reloads=True),
    System(
        "gateway, Redis",
        _shared,
        "`learned`, state in Redis, recorder, batches",
        reloads=True,
        has_state=True,
        replicas=len(HOSTS) + len(LINE_HOSTS),
    ),
    System("gateway, SQLite", _local, "`learned`, a state file, recorder", reloads=True, has_state=True),
    System(
        "nginx",
        _nginx,
        "`least_conn`, `max_fails=3 fail_timeout=2s`, `proxy_next_upstream error timeout invalid_header http_500 "
        "http_502 http_503 non_idempotent`, two tries, `proxy_buffering off`",
        stops_with=signal.SIGQUIT,
        reloads=True,
    ),
    System("vllm-router", _router("vllm-router"), f"`--policy power_of_two {_ROUTER}`"),
    System("sglang-router", _router("sglang-router", "launch"), "the same"),
    System("litellm", _litellm, f"`{_LITELLM_SETTINGS}`"),
)
