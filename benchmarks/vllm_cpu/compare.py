"""Measured and simulated figures side by side, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.calibration.calibration import Calibration
from backends.speculation import Method
from benchmarks.table import head, row
from benchmarks.vllm_cpu.engines import METHODS
from benchmarks.vllm_cpu.measure import CONCURRENCIES, Cell
from benchmarks.vllm_cpu.simulate import Figures, measured, middle, reported, scripts, simulated

AIM = 0.20
FITTED = (2, 8)
"""Concurrencies that the calibration is fitted to."""
TURNAROUND_S = 0.002
"""From the end of an answer to the next request of the client."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One method at one concurrency: medians over rounds."""

    method: Method
    concurrency: int
    measured: Figures
    simulated: Figures

    def error(self, name: str) -> float:
        """Return the relative error of the simulated figure."""
        real: float = getattr(self.measured, name)
        return float(getattr(self.simulated, name)) / real - 1.0


def compare(cells: Sequence[Cell], calibration: Calibration) -> list[Compared]:
    """Return the comparison of every measured loop with its simulation."""
    rows = []
    for method in METHODS:
        loops = reported(scripts(cells, method, calibration))
        for concurrency in CONCURRENCIES:
            chosen = [(cell, requests) for cell, requests in loops if cell.concurrency == concurrency]
            if not chosen:
                continue
            real = [measured(cell) for cell, _ in chosen]
            played = [simulated(calibration, cell, requests, TURNAROUND_S) for cell, requests in chosen]
            rows.append(Compared(method, concurrency, middle(real), middle(played)))
    return rows


def errors(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield a table of errors, a line for each method, of the loops that nothing was fitted to; beyond the aim bold."""
    loads = [load for load in CONCURRENCIES if load not in FITTED]
    first, *rest = map(str, loads)
    yield head("method", *(name for what in ("tokens/s", "TPOT", "TTFT") for name in (f"{what} at {first}", *rest)))
    for method in METHODS:
        of_method = {each.concurrency: each for each in rows if each.method == method}
        cells = [
            _percent(of_method[load].error(name)) if load in of_method else ""
            for name in ("tokens_per_s", "tpot_ms", "ttft_ms")
            for load in loads
        ]
        yield row(method, *cells)


def _percent(error: float) -> str:
    text = f"{error:+.0%}"
    return f"**{text}**" if abs(error) > AIM else text
