"""The systems under attack, each with a key where it knows keys, and what its documentation offers against attacks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.overhead.systems import AUTHORIZATION, KEY, gateway
from benchmarks.systems import System, litellm, nginx, router

POOL = Path(__file__).with_name("pools") / "attacked.yaml"
_LIMITS = "--max-payload-size 67108864 --request-timeout-secs 120"
SYSTEMS = (
    System("gateway", gateway(POOL).argv, AUTHORIZATION),
    System(
        "nginx",
        nginx(
            "client_header_timeout 10s; client_body_timeout 10s; send_timeout 10s; reset_timedout_connection on;",
            location=f'if ($http_authorization != "Bearer {KEY}") {{ return 401; }} '
            "proxy_next_upstream error timeout invalid_header non_idempotent;",
        ),
        AUTHORIZATION,
    ),
    System("vllm-router", router("vllm-router", _LIMITS), AUTHORIZATION),  # which has no keys for clients
    System("sglang-router", router("sglang-router", f"--api-key {KEY} {_LIMITS}"), AUTHORIZATION),
    System(
        "litellm",
        litellm(
            {
                "general_settings": {"master_key": KEY},
                "litellm_settings": {"num_retries": 1, "request_timeout": 120},
            },
            "--keepalive_timeout 5 --limit_concurrency 12000",
        ),
        AUTHORIZATION,
    ),
)
