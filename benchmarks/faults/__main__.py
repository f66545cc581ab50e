"""The same faults for this gateway and its peers: `python -m benchmarks.faults [--only NAME] [--fault NAME]`.

Each system stands before four replicas (`benchmarks.faults.engine`), real processes on loopback, under a steady mixed
load (`benchmarks.faults.load`) that checks every answer word by word. One replica of four, or the system itself, has a
fault for some seconds. `python -m benchmarks.faults soak` mixes the faults for an hour (`benchmarks.faults.soak`).
Peers that are not installed are skipped; `benchmarks/overhead/run` says how to install them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks.faults.injections import INJECTIONS, Injection
from benchmarks.faults.measure import HEAD, Result, fault_row, measure, sums
from benchmarks.faults.soak import soak
from benchmarks.faults.stage import NotStartedError, Stage
from benchmarks.faults.systems import SYSTEMS
from benchmarks.process import raise_open_file_limit
from benchmarks.systems import System, only_loopback


def main() -> None:
    """Inject the faults, and print what was lost; exits with 1 if the gateway lost a request without a word."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["faults", "soak"], default="faults")
    parser.add_argument("--only", action="append", help="part of a system's name; may be repeated")
    parser.add_argument("--fault", action="append", choices=sorted(INJECTIONS), help="may be repeated")
    parser.add_argument("--seconds", type=float, help="length of a fault (6) or of the soak (3600)")
    parser.add_argument("--rate", type=float, default=25.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    only_loopback()
    raise_open_file_limit()
    if arguments.what == "soak":
        sys.exit(asyncio.run(soak(arguments.seconds or 3600.0, arguments.rate, arguments.seed, arguments.fault)))
    results = asyncio.run(_run(arguments))
    print(f"\n{sums(results)}")
    sys.exit(any(each.silent or not each.is_alive for each in results if each.system.startswith("gateway")))


async def _run(arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    print(HEAD)
    for system in SYSTEMS:
        if not any(part in system.name for part in arguments.only or [""]):
            continue
        injections = [INJECTIONS[name] for name in arguments.fault or INJECTIONS]
        for injection in [each for each in injections if each.concerns(system)]:
            try:
                result = await _inject(system, injection, arguments)
            except NotStartedError as error:
                print(f"{injection.name}: {error}", file=sys.stderr)
                continue
            except FileNotFoundError as error:
                print(f"{system.name}: {error} is not installed", file=sys.stderr)
                break
            print(fault_row(result), flush=True)
            results.append(result)
    return results


async def _inject(system: System, injection: Injection, arguments: argparse.Namespace) -> Result:
    """Inject a fault into a system that has just been started."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        stage = Stage(system, Path(name), injection.env(Path(name)))
        async with stage:
            result = await measure(stage, injection, arguments.seconds or 6.0, arguments.rate, arguments.seed)
        result.orphans = stage.orphans
        return result


if __name__ == "__main__":
    main()
