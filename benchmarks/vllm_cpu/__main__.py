"""Compare the simulator with a real vLLM on the CPU: `python -m benchmarks.vllm_cpu COMMAND`.

measure   measure the engine of each method, one at a time
compare   print the errors of simulated figures, as Markdown
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from backends.calibration.load import load_calibration
from benchmarks.vllm_cpu.compare import compare, errors
from benchmarks.vllm_cpu.engines import METHODS
from benchmarks.vllm_cpu.measure import Cell, measure, read, write
from benchmarks.vllm_cpu.quiet import run_in_real_time

MEASURED = Path(__file__).with_name("measured.json.xz")


def main() -> None:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "compare"))
    command = parser.parse_args().command
    if command == "measure":
        if not run_in_real_time():
            print("not allowed to run at real-time priority: chunk times may be late", file=sys.stderr)
        cells: list[Cell] = []
        for method in METHODS:
            cells += asyncio.run(measure(method))
            write(MEASURED, cells)  # a method that fails loses none of those before
    else:
        print(*errors(compare(read(MEASURED), load_calibration("tiny-cpu"))), sep="\n")


if __name__ == "__main__":
    main()
