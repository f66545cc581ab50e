"""The same attacks on this gateway and its peers: `python -m benchmarks.attacks [--only NAME] [--attack NAME]`.

Each system stands before four replicas (`benchmarks.attacks.upstream`) and is attacked by one process
(`benchmarks.attacks.attacker`) while another, a bystander with a valid key, sends a request each 50 ms. It is started
again after an attack that it did not survive or that left it with twice the memory. Only loopback is used. Peers that
are not installed are skipped; `benchmarks/overhead/run` says how to install them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from backends.launch.ports import free_port
from benchmarks.attacks.attacker import ATTACKS
from benchmarks.attacks.measure import Result, attack
from benchmarks.attacks.systems import SYSTEMS
from benchmarks.process import SYSTEM_CPU, most_files, raise_open_file_limit, upstream
from benchmarks.systems import System, only_loopback, started
from benchmarks.table import head, row


def main() -> None:
    """Run the attacks and print a table; exits with 1 if the gateway did not survive one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--only", action="append", help="part of a system's name; may be repeated")
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), help="may be repeated")
    parser.add_argument("--hold", type=float, default=60.0, help="seconds that idle connections are held")
    arguments = parser.parse_args()
    only_loopback()
    raise_open_file_limit()
    names = arguments.attack or list(ATTACKS)
    results: list[Result] = []
    print(f"{os.cpu_count()} processors, {most_files()} open files; connections are held for {arguments.hold:g} s\n")
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        for system in SYSTEMS:
            if any(part in system.name for part in arguments.only or [""]):
                results += _attack_all(system, names, Path(name), arguments.hold)
    print(f"\n{table(results)}")
    sys.exit(any(result.system == "gateway" and result.verdict != "survived" for result in results))


def _attack_all(system: System, names: list[str], folder: Path, hold_s: float) -> Iterator[Result]:
    left = list(names)
    while left:
        behind = free_port()
        try:
            with (
                upstream(behind, folder, {"CHUNKS": "16"}, "attacks"),
                started(system, behind, folder, {SYSTEM_CPU}) as (port, pid),
            ):
                while left:
                    name = left.pop(0)
                    result = attack(system.name, name, port, behind, pid, folder, hold_s)
                    seen = [f"{count} x {status}" for status, count in sorted(result.answers.items())]
                    print(system.name, name, _cell(result), *seen, *result.notes, sep=" | ", flush=True)
                    yield result
                    if result.verdict != "survived" or result.rss_after_mb > 2 * result.rss_before_mb:
                        break
        except FileNotFoundError:
            print(f"{system.name} is not installed", file=sys.stderr)
            return


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table, a row an attack and a column a system.

    A cell has what became of the system unless it survived, requests that the bystander lost, its longest wait in
    seconds, the system's memory before and at its peak and, where connections are held, how many it had left open.
    """
    systems = list(dict.fromkeys(result.system for result in results))
    attacks = list(dict.fromkeys(result.attack for result in results))
    cells = {(result.attack, result.system): _cell(result) for result in results}
    rows = [row(name, *(cells.get((name, system), "") for system in systems)) for name in attacks]
    return "\n".join([head("attack", *systems), *rows])


def _cell(result: Result) -> str:
    parts = [] if result.verdict == "survived" else [f"**{result.verdict}**"]
    if result.lost:
        parts.append(f"lost {sum(result.lost.values())} of {result.requests}")
    parts.append(f"{result.worst_s:.2f} s")
    parts.append(f"{result.rss_before_mb:.0f} → {result.rss_peak_mb:.0f} MB")
    if result.held_s:
        parts.append(f"{result.held} open")
    if result.attack == "framing":
        parts.append(f"**{result.smuggled} smuggled**" if result.smuggled else "0 smuggled")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
