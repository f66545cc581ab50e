"""Measure real engines on the CPU, fit the simulator to them, and compare: `python -m benchmarks.vllm_cpu COMMAND`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from backends.calibration import calibration as calibrations
from backends.speculation import Method
from benchmarks.vllm_cpu import calibrate
from benchmarks.vllm_cpu.compare import compare, errors
from benchmarks.vllm_cpu.engines import METHODS
from benchmarks.vllm_cpu.measure import CONCURRENCIES, Cell, Timeouts, measure, read, write
from benchmarks.vllm_cpu.quiet import run_in_real_time

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
MEASURED = Path(__file__).with_name("measured.json.xz")
FITTED_TO = Path(calibrations.__file__).with_name("data") / "tiny-cpu.yaml"
File = Annotated[Path, typer.Option(help="File of the raw figures.")]


@app.callback()
def commands() -> None:
    """Compare the simulator with a real vLLM on the CPU."""


@app.command("measure")
def measure_command(
    file: File = MEASURED,
    method: Annotated[
        list[Method] | None, typer.Option(help="Only this method; replaces its figures in the file. May be repeated.")
    ] = None,
    rounds: int = 3,
    wait_s: Annotated[
        float, typer.Option(help="Longest wait for a load average below 0.5 before each engine.")
    ] = 300.0,
) -> None:
    """Measure the engine of each method, one at a time."""
    chosen = method or list(METHODS)
    cells: list[Cell] = [cell for cell in (read(file) if file.exists() else []) if cell.method not in chosen]
    if not run_in_real_time():
        print("not allowed to run at real-time priority: chunk times may be late", file=sys.stderr)
    for each in chosen:
        cells += asyncio.run(measure(each, rounds, CONCURRENCIES, Timeouts(engine_wait_s=wait_s)))
        write(file, cells)


@app.command("fit")
def fit_command(
    file: File = MEASURED, to: Annotated[Path, typer.Option(help="Calibration to write.")] = FITTED_TO
) -> None:
    """Fit the simulator to the measurements at concurrency 2 and 8."""
    calibrate.write(to, read(file))


@app.command("compare")
def compare_command(
    file: File = MEASURED,
    calibration: Annotated[Path, typer.Option(help="Calibration file.")] = FITTED_TO,
) -> None:
    """Print the errors of simulated figures, as Markdown."""
    fitted = calibrations.Calibration.model_validate(yaml.safe_load(calibration.read_text(encoding="utf-8")))
    for line in errors(compare(read(file), fitted)):
        print(line)


if __name__ == "__main__":
    app()
