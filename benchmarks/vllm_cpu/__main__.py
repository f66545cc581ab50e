"""Compare the simulator with a real vLLM on the CPU: `python -m benchmarks.vllm_cpu COMMAND`.

measure   measure the engine of each method, one at a time
fit       fit the simulator to the measurements at concurrency 2 and 8
compare   print the errors of simulated figures, as Markdown
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import yaml

from backends.calibration import calibration as calibrations
from backends.speculation import Method
from benchmarks.vllm_cpu import calibrate
from benchmarks.vllm_cpu.compare import compare, errors
from benchmarks.vllm_cpu.engines import METHODS
from benchmarks.vllm_cpu.measure import measure, read, write
from benchmarks.vllm_cpu.quiet import run_in_real_time

MEASURED = Path(__file__).with_name("measured.json.xz")
FITTED_TO = Path(calibrations.__file__).with_name("data") / "tiny-cpu.yaml"


def main() -> None:
    """Measure, fit or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "fit", "compare"))
    parser.add_argument("--file", type=Path, default=MEASURED, help="of the measurements")
    parser.add_argument("--calibration", type=Path, default=FITTED_TO, help="that is written, or compared")
    parser.add_argument(
        "--method", type=Method, action="append", help="measure only this, and replace it in the file; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait-s", type=float, default=300.0, help="for a load average below 0.5 before each engine")
    given = parser.parse_args()
    if given.command == "measure":
        chosen = given.method or list(METHODS)
        cells = [cell for cell in (read(given.file) if given.file.exists() else []) if cell.method not in chosen]
        if not run_in_real_time():
            print("not allowed to run at real-time priority: chunk times may be late", file=sys.stderr)
        for method in chosen:
            cells += asyncio.run(measure(method, given.rounds, given.wait_s))
            write(given.file, cells)
    elif given.command == "fit":
        calibrate.write(given.calibration, read(given.file))
    else:
        fitted = calibrations.Calibration.model_validate(yaml.safe_load(given.calibration.read_text(encoding="utf-8")))
        print(*errors(compare(read(given.file), fitted)), sep="\n")


if __name__ == "__main__":
    main()
