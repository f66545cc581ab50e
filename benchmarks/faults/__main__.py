"""The same faults for this gateway and its peers: `python -m benchmarks.faults [--only NAME] [--fault NAME]`.

Each system stands before four replicas (`benchmarks.faults.engine`), real processes on loopback, under a steady mixed
load (`benchmarks.faults.load`) that checks every answer word by word. One replica of four, or the system itself, has a
fault for some seconds. `python -m benchmarks.faults soak` mixes the faults for an hour (`benchmarks.faults.soak`).
`python -m benchmarks.faults takeover` has new gateways take over from old ones (`benchmarks.faults.takeover`).
Peers that are not installed are skipped; `benchmarks/overhead/run` says how to install them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults.injections import INJECTIONS, Injection
from benchmarks.faults.measure import Result, measure
from benchmarks.faults.soak import soak
from benchmarks.faults.stage import NotStartedError, Stage
from benchmarks.faults.systems import SYSTEMS, System
from benchmarks.faults.table import own_table, peers_table
from benchmarks.faults.takeover import line, takeover
from benchmarks.process import raise_open_file_limit

_RATE_PER_S, _FAULT_S = 25.0, 6.0


def main() -> None:
    """Inject the faults, and print what was lost; exits with 1 if the gateway lost a request without a word."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["faults", "soak", "takeover"], default="faults")
    parser.add_argument("--only", action="append", help="part of a system's name; may be repeated")
    parser.add_argument("--fault", action="append", choices=sorted(INJECTIONS), help="may be repeated")
    parser.add_argument("--seconds", type=float, help="length of a fault (6) or of the soak (3600)")
    parser.add_argument("--rate", type=float, default=_RATE_PER_S, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=20, help="takeovers")
    parser.add_argument("--passed", action="store_true", help="a takeover by a passed socket, not by reuse_port")
    parser.add_argument("--workers", type=int, default=1, help="workers of each gateway of a takeover")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    arguments = parser.parse_args()
    # Peers that look for their latest prices or report their use must not: only loopback is used.
    os.environ.update({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"})
    raise_open_file_limit()
    if arguments.what == "soak":
        seconds = arguments.seconds or 3600.0
        sys.exit(asyncio.run(soak(seconds, arguments.rate, arguments.seed, arguments.fault, arguments.json)))
    if arguments.what == "takeover":
        found = asyncio.run(
            takeover(arguments.times, arguments.rate, passes=arguments.passed, workers=arguments.workers)
        )
        print(line(found))
        sys.exit(bool(found.refused or found.lost))
    results = asyncio.run(_run(arguments))
    print(f"\n{peers_table(results)}\n\n{own_table(results)}")
    sys.exit(any(each.system.startswith("gateway") and (each.silent or not each.is_alive) for each in results))


async def _run(arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    for system in SYSTEMS:
        if not any(part in system.name for part in arguments.only or [""]):
            continue
        injections = [INJECTIONS[name] for name in arguments.fault or INJECTIONS]
        todo = [injection for injection in injections if injection.concerns(system)]
        for injection in todo:
            try:
                result = await _inject(system, injection, arguments)
            except NotStartedError as error:
                print(f"{injection.name}: {error}", file=sys.stderr)
                continue
            if result is None:
                break
            print(_line(result), flush=True)
            results.append(result)
            if arguments.json is not None:  # after each, in case the next takes the machine with it
                arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    return results


async def _inject(system: System, injection: Injection, arguments: argparse.Namespace) -> Result | None:
    """Inject a fault into a system that has just been started; None if it is not installed."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        try:
            stage = Stage(system, folder, injection.env(folder))
            async with stage:
                seconds = arguments.seconds or _FAULT_S
                result = await measure(stage, injection, seconds, arguments.rate, arguments.seed)
        except FileNotFoundError as error:
            print(f"{system.name}: {error} is not installed", file=sys.stderr)
            return None
        result.orphans = stage.orphans
        return result


def _line(result: Result) -> str:
    failed = ", ".join(f"{count} {what}" for what, count in sorted(result.failed.items())) or "none failed"
    back = "-" if result.back_s is None else f"{result.back_s:.1f}"
    idle = "NEVER" if result.idle_s is None else f"{result.idle_s:.1f}"
    return (
        f"{result.system:16} {result.fault:18} sent {result.sent:5} answered {result.answered:5} left {result.left:3} "
        f"{failed}; twice {result.sent_twice}/{result.run_twice}; longest {result.longest_s:.1f} s, failing "
        f"{result.failing_s:.1f} s, back {back} s, idle {idle} s; {result.rss_before_mb:.0f} -> "
        f"{result.rss_after_mb:.0f} MB; orphans {result.orphans}; "
        f"lag {result.lag_s:.2f} s{'' if result.is_alive else '; DIED'}"
    )


if __name__ == "__main__":
    main()
