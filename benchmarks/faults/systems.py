"""The systems before the replicas: this gateway and its peers, each set up as its documentation says is best."""

from __future__ import annotations

import json
import signal
from typing import Any

from benchmarks.faults.asking import LINES, MODEL
from benchmarks.systems import HOSTS, WITHOUT_KEY, Site, System, gateway_command, litellm, nginx, router

LINE_HOSTS = ("127.0.0.5", "127.0.0.6")
"""The replicas of the model that batches ask for."""
ADMIN_KEY = "faults-admin-key"


def gateway(site: Site, policy: str, *, rescue: bool = True, **more: Any) -> list[str]:
    """Return the command of a gateway with a policy, and more sections of its pool file."""
    backends = {f"b{number}": {"method": "baseline", "url": url} for number, url in enumerate(site.urls)}
    models = {MODEL: {"policy": {"name": policy}, "rescue": rescue, "backends": backends}}
    if "batches" in more:
        lines = {host: {"method": "baseline", "url": f"http://{host}:{site.upstream_port}"} for host in LINE_HOSTS}
        models[LINES] = {**models[MODEL], "backends": lines}
    pool = {"models": models, "admin": {"key": ADMIN_KEY}, **more}
    site.pool.write_text(json.dumps(pool, indent=1))  # JSON is YAML
    return gateway_command(site.pool, site.port)


def _with_state(site: Site) -> list[str]:
    recorder, batches = {"path": str(site.disk / "records")}, {"folder": str(site.disk / "batches")}
    return gateway(site, "learned", state={"redis": site.redis}, recorder=recorder, batches=batches)


_ROUTER = (
    "--health-check-interval-secs 2 --health-check-timeout-secs 2 --health-failure-threshold 2 "
    "--health-success-threshold 1 --retry-max-retries 2 --retry-initial-backoff-ms 20 --cb-failure-threshold 3 "
    "--cb-success-threshold 1 --cb-timeout-duration-secs 2 --request-timeout-secs 600"
)
_NGINX = nginx(
    "client_body_buffer_size 1m;",
    "least_conn; keepalive 64;",
    "max_fails=3 fail_timeout=2s",
    "proxy_connect_timeout 2s; proxy_read_timeout 60s; proxy_next_upstream_tries 2; "
    "proxy_next_upstream error timeout invalid_header http_500 http_502 http_503 non_idempotent;",
)
_LITELLM = {
    "num_retries": 2, "allowed_fails": 3, "cooldown_time": 2, "routing_strategy": "least-busy", "timeout": 600,
}  # fmt: skip
SYSTEMS = (
    System("gateway", lambda site: gateway(site, "least_loaded", state="none"), reloads=True),
    System(
        "gateway, no rescue",
        lambda site: gateway(site, "least_loaded", rescue=False, state="none"),
        reloads=True,
    ),
    System("gateway, Redis", _with_state, reloads=True, has_state=True, hosts=HOSTS + LINE_HOSTS),
    System("nginx", _NGINX, stops_with=signal.SIGQUIT, reloads=True),
    System("vllm-router", router("vllm-router", _ROUTER, "power_of_two")),
    System("sglang-router", router("sglang-router", _ROUTER, "power_of_two")),
    System("litellm", litellm({**WITHOUT_KEY, "router_settings": _LITELLM})),
)
