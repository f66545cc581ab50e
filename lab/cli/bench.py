"""`gateway bench` on the command line."""

from __future__ import annotations

from gateway.cli.extras import require
from lab.bench.options import BenchOptions
from lab.options.command import command


@command
def bench(options: BenchOptions) -> int:
    """Send a load to endpoints, or to each replica of a pool, at each rate, temperature and k, and compare them."""
    require("lab", "numba", "duckdb")
    from lab.bench.command import run_bench

    return run_bench(options)
