"""One target under atheris: `python -m tests.fuzz.guided TARGET [options of libFuzzer]`, as `scripts/fuzz` runs it."""

from __future__ import annotations

import importlib
import sys

import atheris

_INSTRUMENTED = ["backends", "policies", "gateway", "lab", "yaml"]


def main() -> None:
    """Fuzz until libFuzzer ends."""
    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=_INSTRUMENTED):
        target = importlib.import_module(f"tests.fuzz.targets.{name}")
    itself = f"{sys.executable} -m tests.fuzz.guided {name}"  # a shell runs it with further options, to merge
    atheris.Setup([itself, *options], target.fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
