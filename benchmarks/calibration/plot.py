"""The plot: simulated against measured speedup, and the distribution of errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.calibration.arithmetic import Row

# Colours that colour-blind readers can tell apart (Okabe and Ito), and different marks.
_STYLE = {
    "apertus": ("#0072B2", "o", "Apertus (GH200)"),
    "vllm012": ("#D55E00", "s", "vLLM 0.12 metrics"),
    "specforge": ("#999999", "^", "SpecForge (SGLang)"),
    "vllm-0.19-lab": ("#CC79A7", "D", "vLLM 0.19 lab"),
    "vllm-0.12-guide": ("#009E73", "P", "vLLM 0.12 guide"),
    "sd-illusion": ("#E69F00", "X", "arXiv 2601.11580"),
    "vllm-52362": ("#56B4E9", "v", "DSpark on MI350X"),
    "vllm-blog-2026-08": ("#000000", "<", "DSpark on B300"),
    "infera-74": ("#F0E442", ">", "DSpark on MI355X"),
}
_TICKS = (0.2, 0.5, 1, 2, 4)


def plot(rows: Sequence[Row], blind: Sequence[Row], path: Path) -> None:
    """Write the plot of all speedups, in the format given by the file name."""
    mpl.rcParams.update({"svg.hashsalt": "calibration", "font.size": 9})
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), layout="constrained")
    chosen = [row for row in rows if row.quantity == "speedup"]
    for axis, part in zip(axes, ("fit", "report"), strict=False):
        _scatter(axis, [row for row in chosen if row.part == part])
        axis.set_title(f"{part} part, acceptance as measured")
        axis.set_aspect("equal")
    axes[0].legend(loc="lower right", frameon=False, fontsize=8)
    others = [row for row in blind if row.quantity == "speedup" and row.part == "report"]
    _errors(axes[2], [row for row in chosen if row.part == "report"], others)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _scatter(axis: Axes, rows: Sequence[Row]) -> None:
    line = np.array([0.15, 6.0])
    axis.fill_between(line, line * 0.8, line * 1.2, color="0.92", zorder=0, label="within 20%")
    axis.plot(line, line, color="0.5", linewidth=0.8, zorder=1)
    for source, (colour, mark, label) in _STYLE.items():
        points = [(row.measured, row.simulated) for row in rows if row.group.source == source]
        if points:
            measured, simulated = zip(*points, strict=True)
            axis.scatter(measured, simulated, s=16, c=colour, marker=mark, alpha=0.7, linewidths=0, label=label)
    axis.set(xscale="log", yscale="log", xlim=(0.18, 5), ylim=(0.18, 5))
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_locator(FixedLocator(_TICKS))
        which.set_major_formatter("{x:g}")
        which.set_minor_locator(NullLocator())
    axis.set(xlabel="measured speedup over the baseline", ylabel="simulated")


def _errors(axis: Axes, rows: Sequence[Row], blind: Sequence[Row]) -> None:
    for name, chosen, style in (("as measured", rows, "-"), ("blind", blind, "--")):
        errors = np.sort([abs(row.error) for row in chosen])
        if len(errors):
            axis.step(errors * 100, np.arange(1, len(errors) + 1) / len(errors), style, color="#0072B2", label=name)
    axis.axvline(20, color="0.7", linewidth=0.8)
    axis.axhline(0.9, color="0.7", linewidth=0.8)
    axis.set(xlim=(0, 60), ylim=(0, 1), xlabel="absolute error of the speedup, %", ylabel="share of the report part")
    axis.set_title("report part, by source of acceptance")
    axis.legend(loc="lower right", frameon=False)
