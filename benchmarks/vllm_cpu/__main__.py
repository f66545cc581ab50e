"""`python -m benchmarks.vllm_cpu`: measure real engines on the CPU, fit the simulator to them, and compare."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

import backends.simulator
from backends.calibration.calibration import Calibration
from backends.speculation import Method
from benchmarks.vllm_cpu import calibrate, routed, side_by_side
from benchmarks.vllm_cpu.compare import compare, table
from benchmarks.vllm_cpu.engines import METHODS
from benchmarks.vllm_cpu.measure import CONCURRENCIES, Cell, Timeouts, measure, read, write
from benchmarks.vllm_cpu.quiet import run_at_once

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
MEASURED = Path(__file__).with_name("measured.json.xz")
FITTED_TO = Path(backends.simulator.__path__[0], "calibrations", "tiny-cpu.yaml")
File = Annotated[Path, typer.Option(help="Raw figures.")]


@app.callback()
def commands() -> None:
    """Hold the simulator against real vLLM on the CPU."""


@app.command("measure")
def measure_command(
    file: File = MEASURED,
    method: Annotated[list[Method] | None, typer.Option(help="These alone; theirs in the file are replaced.")] = None,
    rounds: int = 3,
    wait_s: Annotated[float, typer.Option(help="For a load average below 0.5 before each engine, at most.")] = 300.0,
) -> None:
    """Measure each method's engine, one at a time."""
    chosen = method or list(METHODS)
    cells: list[Cell] = [cell for cell in (read(file) if file.exists() else []) if cell.method not in chosen]
    if not run_at_once():
        print("not allowed to run at real-time priority: chunks may be noted late", file=sys.stderr)
    for one in chosen:
        cells += asyncio.run(measure(one, rounds, CONCURRENCIES, Timeouts(engine_wait_s=wait_s)))
        write(file, cells)


@app.command("fit")
def fit_command(
    file: File = MEASURED, to: Annotated[Path, typer.Option(help="Calibration to write.")] = FITTED_TO
) -> None:
    """Fit the simulator to what was measured at 2 and 8 requests at once."""
    calibrate.write(to, read(file))


@app.command("compare")
def compare_command(
    file: File = MEASURED, calibration: Annotated[Path, typer.Option(help="Calibration file.")] = FITTED_TO
) -> None:
    """Print what was measured beside what the simulator says, as Markdown."""
    fitted = Calibration.model_validate(yaml.safe_load(calibration.read_text(encoding="utf-8")))
    for line in table(compare(read(file), fitted)):
        print(line)


@app.command("side-by-side")
def side_by_side_command(
    backend: Annotated[str, typer.Option(help="Replica of the pool file.")] = "plain",
    concurrency: int = 4,
    requests: int = 48,
    rounds: int = 3,
) -> None:
    """Put the same load on a gateway with `vllm bench serve` and `gateway bench`, and print what both say."""
    for line in side_by_side.table(*side_by_side.side_by_side(backend, concurrency, requests, rounds)):
        print(line)


@app.command("routed")
def routed_command(
    rounds: Annotated[int, typer.Option(help="Turns of each policy.")] = 5,
    turn_s: Annotated[float, typer.Option(help="Seconds in which requests are sent in a turn.")] = 40.0,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 6.0,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every request here.")] = None,
) -> None:
    """Put a mixed load on the four replicas of the pool file through one policy after another."""
    sent, turns = asyncio.run(routed.routed(rounds, turn_s, rate, seed))
    if json_file is not None:
        routed.write(json_file, sent, turns)
    for first in (0, 1) if rounds > 1 else (0,):
        print(f"\nFrom round {first} on:\n")
        for line in routed.table(sent, first):
            print(line)
    others = max(turn.foreign_share for turn in turns)
    print(f"\nOther processes took at most {others:.2f} of a core in a turn (the engines and gateways not counted).")


if __name__ == "__main__":
    app()
