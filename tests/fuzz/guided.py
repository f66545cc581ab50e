"""One target under atheris: `python -m tests.fuzz.guided TARGET DEADLINE [options of libFuzzer]`."""

from __future__ import annotations

import importlib
import sys
import time

import atheris

_INSTRUMENTED = ["backends", "policies", "gateway", "lab", "yaml"]


def main() -> None:
    """Fuzz until DEADLINE, by `time.monotonic`; 0 runs without one."""
    name, deadline_s, *options = sys.argv[1:]
    with atheris.instrument_imports(include=_INSTRUMENTED):
        target = importlib.import_module(f"tests.fuzz.targets.{name}")
    if float(deadline_s):
        options.append(f"-max_total_time={max(1, round(float(deadline_s) - time.monotonic()))}")
    itself = f"{sys.executable} -m tests.fuzz.guided {name} 0"  # a shell runs it with further options, to merge
    atheris.Setup([itself, *options], target.fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
