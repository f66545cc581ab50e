"""Fuzzing of several targets, with a table of what came of it: `scripts/fuzz`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import head, row
from tests.fuzz.kept import CORPUS, FOLDER, TARGETS
from tests.support.paths import ROOT

_CACHE = ROOT / ".cache" / "fuzz"
_MOST_BYTES = {"pool_file": 768}
"""By target, the size of the longest input; 2 KB where nothing is said."""
_MOST_RSS_MB = 2048
_MOST_S = 30
"""Seconds that one input may take: under instrumentation, and on a machine that does other things too."""
_QUICK = {
    "requests": 50_000,
    "answers": 30_000,
    "events": 30_000,
    "bodies": 40_000,
    "pool_file": 1_000,
    "traces": 5_000,
    "records": 40_000,
}
"""By target, the inputs of a quick campaign: about ten seconds on a free core."""
_STATUS = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)(?: corp: (\d+)/\S+)?.*?rss: (\d+)Mb")


@dataclass(frozen=True, slots=True)
class Campaign:
    """What came of fuzzing one target.

    Parameters
    ----------
    edges, features
        Of the code that was reached, as libFuzzer counts: edges, and edges by how often they were taken.
    failure
        Path of the input that failed; None if none did.
    """

    name: str
    executions: int
    seconds: float
    edges: int
    features: int
    inputs: int
    rss_mb: int
    failure: Path | None


def fuzz(name: str, seconds: float | None, seed: int) -> Campaign:
    """Fuzz one target for about `seconds`, the start of its process included, or until an input fails.

    Parameters
    ----------
    seconds
        None for a quick campaign: a fixed number of inputs, which are the same in each run with one seed.
    """
    began_s = time.monotonic()
    found, failures = _CACHE / "corpus" / name, _CACHE / "failures"
    found.mkdir(parents=True, exist_ok=True)
    failures.mkdir(parents=True, exist_ok=True)
    prefix = f"{failures}/{name}-{time.time_ns():x}-"
    options = [
        f"-max_len={_MOST_BYTES.get(name, 2048)}",
        f"-rss_limit_mb={_MOST_RSS_MB}",
        f"-timeout={_MOST_S}",
        f"-report_slow_units={_MOST_S}",
        f"-artifact_prefix={prefix}",
        f"-dict={FOLDER / 'dictionaries' / f'{name}.dict'}",
        "-reload=0",
        f"-seed={seed}",
    ]
    if seconds is None:
        options.append(f"-runs={_QUICK[name]}")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fuzz.guided",
            name,
            str(0 if seconds is None else began_s + seconds),
            *options,
            str(found),
            str(CORPUS / name),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed) if seed else "random"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
        errors="replace",
    )
    (_CACHE / f"{name}.log").write_text(done.stdout)
    states = [[int(number or 0) for number in state] for state in _STATUS.findall(done.stdout)]
    failed = sorted(failures.glob(f"{Path(prefix).name}*"))
    executions, edges, features, inputs, _ = states[-1] if states else [0] * 5  # a kept input fails
    rss_mb = max((state[-1] for state in states), default=0)
    if not (failed or states) or (done.returncode and not failed):
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return Campaign(
        name, executions, time.monotonic() - began_s, edges, features, inputs, rss_mb, failed[0] if failed else None
    )


def keep(name: str) -> None:
    """Add the smallest inputs that reach code which the kept ones do not, to the kept corpus."""
    options = [f"-max_len={_MOST_BYTES.get(name, 2048)}", "-merge=1", str(CORPUS / name), str(_CACHE / "corpus" / name)]
    subprocess.run([sys.executable, "-m", "tests.fuzz.guided", name, "0", *options], cwd=ROOT, check=True)


def main() -> None:
    """Fuzz the targets and print a table; exits with 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", choices=[[], *TARGETS], help="all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--quick", action="store_true", help="a fixed number of inputs, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="repeats the same inputs; 0 draws one")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="add what was found to tests/fuzz/corpus, and fuzz nothing")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    if arguments.keep:
        for name in names:
            keep(name)
        return
    turns = -(-len(names) // arguments.jobs)
    columns = ("target", "executions", "per second", "edges", "features", "inputs", "peak MB", "failure")
    print(head(*columns), flush=True)
    seconds = None if arguments.quick else arguments.seconds / turns
    failed = False
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for one in pool.map(lambda name: fuzz(name, seconds, arguments.seed), names):
            failed |= one.failure is not None
            failure = one.failure.relative_to(ROOT) if one.failure else "none"
            figures = f"{one.executions / one.seconds:.0f}", one.edges, one.features, one.inputs, one.rss_mb
            print(row(one.name, one.executions, *figures, failure), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
