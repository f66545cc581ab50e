"""The calibrations of the cases: those of the package, and step times of another engine that are kept here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from backends.calibration.calibration import Calibration, Drafting, StepTime, load_calibration
from backends.speculation import Method

_SGLANG = Path(__file__).parent / "sglang.yaml"
_MEMORY_OF = "llama-3.1-8b-h200"


@cache
def setup(name: str) -> Calibration:
    """Return the calibration of a setup: one of the package, or `sglang/MODEL`.

    Raises
    ------
    ValueError
        If there is no such setup.
    """
    if not name.startswith("sglang/"):
        return load_calibration(name)
    models = yaml.safe_load(_SGLANG.read_text(encoding="utf-8"))
    model = name.removeprefix("sglang/")
    if model not in models["models"]:
        raise ValueError(f"{_SGLANG.name} has no step times of {model!r}")
    entry, common = models["models"][model], models["common"]
    # Lengths and batches are small, so memory and limits do not matter; acceptance comes with the rows.
    base = load_calibration(_MEMORY_OF)
    drafting = Drafting(source=common["source"], **entry["drafting"])
    eagle3 = base.method(Method.EAGLE3).model_copy(
        update={"drafting": drafting, "acceptance": {}, "acceptance_like": None}
    )
    return base.model_copy(
        update={
            "name": name,
            "target": model,
            "step": StepTime(source=common["source"], **common["step"], **entry["step"]),
            "methods": {Method.BASELINE: base.method(Method.BASELINE), Method.EAGLE3: eagle3},
        }
    )
