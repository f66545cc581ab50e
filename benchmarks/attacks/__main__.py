"""The same attacks on this gateway and its peers: `python -m benchmarks.attacks [--only NAME] [--attack NAME]`.

Each system stands before four replicas (`benchmarks.attacks.upstream`) and is attacked by one process
(`benchmarks.attacks.attacker`) while another, a bystander with a valid key, sends a request each 50 ms. It is started
again after an attack that it did not survive or that left it with twice the memory. Only loopback is used. Peers that
are not installed are skipped; `benchmarks/overhead/run` says how to install them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from backends.launch.ports import free_port
from benchmarks.attacks.attacker import ATTACKS
from benchmarks.attacks.measure import Result, attack
from benchmarks.attacks.systems import HARDENING, systems
from benchmarks.attacks.table import table
from benchmarks.overhead.process import SYSTEM_CPU, most_files, raise_open_file_limit, running, until_answered
from benchmarks.overhead.systems import System


def main() -> None:
    """Run the attacks and print a table; exits with 1 if the gateway did not survive one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--only", action="append", help="part of a system's name; may be repeated")
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), help="may be repeated")
    parser.add_argument("--hold", type=float, default=60.0, help="seconds that idle connections are held")
    parser.add_argument("--build", default="", help="NAME=COMMAND of an installed gateway, instead of this checkout")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    arguments = parser.parse_args()
    # Peers that look for their latest prices or report their use must not: only loopback is used.
    os.environ.update({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"})
    raise_open_file_limit()
    names = arguments.attack or list(ATTACKS)
    results: list[Result] = []
    print(f"{os.cpu_count()} processors, {most_files()} open files; connections are held for {arguments.hold:g} s\n")
    _print_head()
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        for system in systems(arguments.build):
            if any(part in system.name for part in arguments.only or [""]):
                results += _attack_all(system, names, Path(name), arguments.hold)
                if arguments.json is not None:  # after each, in case the next takes the machine with it
                    arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(f"\n{table(results)}\n")
    for attacked in dict.fromkeys(result.system for result in results):
        print(f"{attacked}: {HARDENING[attacked]}")
    sys.exit(any(result.system == "gateway" and result.verdict != "survived" for result in results))


def _attack_all(system: System, names: list[str], folder: Path, hold_s: float) -> Iterator[Result]:
    left = list(names)
    while left:
        try:
            with _started(system, folder) as (port, upstream, pid):
                while left:
                    result = attack(system.name, left.pop(0), port, upstream, pid, folder, hold_s)
                    _print(result)
                    yield result
                    if result.verdict != "survived" or result.rss_after_mb > 2 * result.rss_before_mb:
                        break
        except FileNotFoundError:
            print(f"{system.name} is not installed", file=sys.stderr)
            return


@contextlib.contextmanager
def _started(system: System, folder: Path) -> Iterator[tuple[int, int, int]]:
    """Run replicas and a system before them; yields its port, theirs and its process id."""
    port, upstream = free_port(), free_port()
    argv = system.argv(port, upstream, folder)
    if argv is None:
        raise FileNotFoundError(system.name)
    log = folder / f"{system.name}.log"
    replicas = [sys.executable, "-m", "benchmarks.attacks.upstream", str(upstream)]
    env = {"UPSTREAM": str(upstream), "FOLDER": str(folder), "CHUNKS": "16"}
    with running(replicas, {1}, folder / "upstream.log", env):
        time.sleep(1.0)
        with running(argv, {SYSTEM_CPU}, log, env) as pid:
            until_answered(port, system.headers, log)
            yield port, upstream, pid


def _print_head() -> None:
    columns = ("system", "attack", "verdict", "lost", "worst s", "P99 s", "MB before / peak / after", "held", "answers")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def _print(result: Result) -> None:
    lost = ", ".join(f"{count} x {what}" for what, count in sorted(result.lost.items()))
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(result.answers.items()))
    if result.attack == "framing":
        seen = [note.partition(":")[0] for note in result.notes if "SMUGGLED" in note]
        answers += f"; smuggled: {', '.join(seen) or 'none'}"
    elif result.notes:
        answers = "; ".join(filter(None, [answers, *result.notes]))
    held = f"{result.held} of {result.opened} after {result.held_s:g} s" if result.held_s else ""
    memory = f"{result.rss_before_mb:.0f} / {result.rss_peak_mb:.0f} / {result.rss_after_mb:.0f}"
    print(
        f"| {result.system} | {result.attack} | {result.verdict} | {f'{lost} of {result.requests}' if lost else 0} "
        f"| {result.worst_s:.2f} | {result.p99_s:.3f} | {memory} | {held} | {answers} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
