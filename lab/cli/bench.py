"""`gateway bench` on the command line."""

from __future__ import annotations

from gateway.cli.extras import require
from lab.bench.options import BenchOptions
from lab.options.command import command


@command
def bench(options: BenchOptions) -> int:
    """Measure endpoints, or each replica of a pool, and compare them.

    Each gets the same load at each rate, temperature and k.

    \b
    gateway bench --url plain=http://10.0.0.1:8000 --url head=http://10.0.0.2:8000 --rate 4
    gateway bench --config pool.yaml --rate 2,8 --json bench.json
    """
    require("lab", "numba", "duckdb")
    from lab.bench.command import run_bench

    return run_bench(options)
