"""How far calibrations scaled to another GPU are off: `python -m benchmarks.calibration scaled TABLE`.

TABLE is that of `base`: the TPOT of a setup is predicted from the constants of the same on another GPU, or in another
precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from backends.calibration.base_engines import base_engines
from backends.calibration.load import load_calibration
from backends.calibration.scaling import scaled
from benchmarks.calibration.base import constants_ms, read, tpot_ms


def engines(table: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield errors of the TPOT of setups, with the constants of the same on another GPU or in another precision."""
    known = base_engines()
    for setup, cells in read(table).items():
        there = known.get(setup.name)
        if there is None or there.engine != f"{setup.engine} {setup.version}".strip():
            continue
        for here in known.values():
            if (here.model, here.gpus, parallel(here.name)) != (there.model, there.gpus, parallel(there.name)):
                continue
            if (here.gpu == there.gpu) == (here.precision == there.precision):
                continue  # both differ, or neither
            step = scaled(load_calibration(here.name), there.gpu, there.precision).step
            predicted = tpot_ms(constants_ms(step), step.expert_share, cells)
            what = "GPU" if here.gpu != there.gpu else "precision"
            engine = "same engine" if here.engine == there.engine else "other versions of the engine"
            yield f"another {what}, {engine}", predicted / cells.tpot_ms - 1


def parallel(name: str) -> str:
    """Return what a name says of parallelism and engine."""
    return name.rpartition("/")[2].partition("-")[2]


def errors(table: Path) -> Iterable[str]:
    """Yield from what was scaled, how many figures, the median error and the largest."""
    found: dict[str, list[float]] = defaultdict(list)
    for what, off in engines(table):
        found[what] += np.abs(off).tolist()
    for what, each in found.items():
        yield f"{what} | {len(each)} | {np.median(each):.1%} | {max(each):.0%}"
