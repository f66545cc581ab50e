"""The systems under test: the gateway with each pool file of `pools/`, and the installed peers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.systems import WITHOUT_KEY, Site, System, gateway_command, litellm, nginx, router

POOLS = Path(__file__).with_name("pools")
KEY, HOST = "sk-bench", ("127.0.0.1",)
AUTHORIZATION = (f"authorization: Bearer {KEY}",)


def gateway(pool: Path, *, workers: int = 1, build: str = "") -> System:
    """Return the gateway with a pool file; `build` is `NAME=COMMAND` of an installed one."""
    name, _, installed = build.partition("=")

    def argv(site: Site) -> list[str]:
        return gateway_command(pool, site.port, "--workers", str(workers), installed=installed)

    label = f"gateway{' ' if name else ''}{name}, {pool.stem}"
    return System(label, argv, AUTHORIZATION, "recorder:" in pool.read_text(), HOST)


_MANY = "keepalive_requests 1000000000;"
PEERS = (
    System("nginx", nginx(_MANY, f"keepalive 512; {_MANY}", "", "client_body_buffer_size 2m;", 40_000), hosts=HOST),
    System("vllm-router", router("vllm-router"), hosts=HOST),
    System("sglang-router", router("sglang-router"), hosts=HOST),
    System("litellm", litellm(WITHOUT_KEY), hosts=HOST),
)


def systems(pools: list[Path], builds: list[str]) -> list[System]:
    """Return each build of the gateway with the given pool files (else those of `pools/`), and the peers."""
    files = pools or sorted(POOLS.glob("*.yaml"))
    return [*(gateway(pool, build=build) for pool in files for build in builds or [""]), *PEERS]
