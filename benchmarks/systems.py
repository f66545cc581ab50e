"""The systems that are compared: this gateway and its peers, each before replicas on one port of several addresses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.launch.ports import free_port
from benchmarks.process import running, until_answered

_NGINX = """\
{user}worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
worker_rlimit_nofile {files}; events {{ worker_connections {connections}; }}
http {{
  access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; {http}
  upstream up {{ {upstream} }}
  server {{ listen 127.0.0.1:{port} backlog=2048; location / {{
    proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; {location} }} }}
}}
"""


HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 5))


@dataclass(frozen=True, slots=True)
class Site:
    """Where a system runs.

    Parameters
    ----------
    port, upstream_port, hosts
        Its port, that of all replicas and their addresses.
    folder, disk
        For its files, and for what it stores, which gets full.
    redis
        URL of a Redis.
    """

    port: int
    upstream_port: int
    folder: Path
    hosts: Sequence[str]
    disk: Path = Path()
    redis: str = ""

    @property
    def pool(self) -> Path:
        """Return the path of the gateway's pool file."""
        return self.folder / "pool.yaml"

    @property
    def urls(self) -> list[str]:
        """Return the addresses of the replicas."""
        return [f"http://{host}:{self.upstream_port}" for host in self.hosts]


Argv = Callable[[Site], list[str]]


@dataclass(frozen=True, slots=True)
class System:
    """A proxy that can be started.

    Parameters
    ----------
    argv
        Function from its site to its command line. The environment has UPSTREAM and FOLDER too.
    headers
        Headers that its requests must have.
    records
        Whether it records requests and counts those that it drops.
    hosts
        Addresses of its replicas.
    stops_with
        The signal after which it finishes what it has.
    reloads
        Whether it reads its configuration again at SIGHUP.
    has_state
        Whether it stores what it learns, and records requests.
    """

    name: str
    argv: Argv
    headers: tuple[str, ...] = ()
    records: bool = False
    hosts: tuple[str, ...] = HOSTS
    stops_with: signal.Signals = signal.SIGTERM
    reloads: bool = False
    has_state: bool = False

    def command(self, site: Site) -> list[str]:
        """Return its command line at a site; raises `FileNotFoundError` if it is not installed."""
        argv = self.argv(site)
        if shutil.which(argv[0]) is None:
            raise FileNotFoundError(self.name)
        return argv


def only_loopback() -> None:
    """Keep peers that look for their latest prices, or report their use, from doing so."""
    os.environ.update({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"})


@contextlib.contextmanager
def started(system: System, behind: int, folder: Path, cpus: set[int]) -> Iterator[tuple[int, int]]:
    """Run a system in front of an upstream; yields its port and process id."""
    port, log = free_port(), folder / f"{system.name}.log"
    with running(
        system.command(Site(port, behind, folder, system.hosts)), cpus, log, environment(behind, folder)
    ) as pid:
        until_answered(port, system.headers, log)
        yield port, pid


def environment(upstream_port: int, folder: Path) -> dict[str, str]:
    """Return the variables that the pool files refer to, and a separate state directory for the gateway."""
    return {"UPSTREAM": str(upstream_port), "FOLDER": str(folder), "XDG_STATE_HOME": str(folder / "state")}


def gateway_command(pool: Path, port: int, *options: str, installed: str = "") -> list[str]:
    """Return the command of a gateway: of an installation, by default that in PATH, else this checkout, uncompiled."""
    found = installed or shutil.which("gateway")
    return [
        *([found] if found else [sys.executable, "-m", "gateway"]),
        "--config",
        str(pool),
        "--port",
        str(port),
        *options,
    ]


def nginx(
    http: str = "", upstream: str = "keepalive 64;", server: str = "", location: str = "", connections: int = 15_000
) -> Argv:
    """Return nginx with directives of its sections; `server` are the parameters of each replica."""

    def argv(site: Site) -> list[str]:
        servers = " ".join(f"server {url.removeprefix('http://')} {server};" for url in site.urls)
        config = site.folder / "nginx.conf"
        user = "" if os.geteuid() else "user root; "  # else its workers may not write to the folder
        text = _NGINX.format(
            user=user,
            folder=site.folder,
            files=connections + 5000,
            connections=connections,
            http=http,
            upstream=f"{servers} {upstream}",
            port=site.port,
            location=location,
        )
        config.write_text(text)
        return ["nginx", "-c", str(config), "-e", str(site.folder / "error.log")]

    return argv


def router(command: str, options: str = "", policy: str = "round_robin") -> Argv:
    """Return vLLM's or SGLang's router."""

    def argv(site: Site) -> list[str]:
        launch = ["launch"] if command == "sglang-router" else []
        where = ["--worker-urls", *site.urls, "--host", "127.0.0.1", "--port", str(site.port)]
        where += ["--prometheus-port", str(free_port())]  # the default is the same for all
        return [command, *launch, *where, "--policy", policy, "--log-level", "error", *options.split()]

    return argv


def litellm(settings: dict[str, Any], options: str = "") -> Argv:
    """Return LiteLLM with more sections of its configuration."""

    def argv(site: Site) -> list[str]:
        config = site.folder / "litellm.yaml"
        parameters = [{"model": "hosted_vllm/m", "api_base": f"{url}/v1", "api_key": "none"} for url in site.urls]
        models = [{"model_name": "m", "litellm_params": each} for each in parameters]
        config.write_text(json.dumps({"model_list": models, **settings}))  # JSON is YAML
        where = ["--config", str(config), "--host", "127.0.0.1", "--port", str(site.port)]
        return ["litellm", *where, "--telemetry", "False", *options.split()]

    return argv


WITHOUT_KEY = {"general_settings": {"dangerously_permit_weak_or_unset_master_key": True}}
"""LiteLLM's settings for clients without keys."""
