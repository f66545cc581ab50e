"""How well tokens per step at k = 8 follow from those at k = 1 to 3: `python -m benchmarks.calibration depth FOLDER`.

FOLDER holds golden acceptance lengths of SemiAnalysisAI/InferenceX (Apache-2.0): MODEL_METHOD.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from statistics import mean, median

import yaml

from backends.calibration.draft_profile import rates_to
from backends.speculation import Method

KNOWN = 3
TRIED = tuple(step / 20 for step in range(21))  # of the one constant of chained layers, and that of others


@dataclass(frozen=True, slots=True)
class Curve:
    """Tokens per step of a model by k = 1, 2, ..., 8."""

    file: str
    name: str
    method: Method
    tokens: Sequence[float]


def curves(folder: Path) -> list[Curve]:
    """Return the curves of the files in a folder."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        method = max((each for each in Method if f"_{each}" in path.name), key=len)
        for model, modes in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            for mode, tokens in modes.items():
                found.append(Curve(path.name, f"{model} {mode}", method, [tokens[k] for k in sorted(tokens)]))
    return found


def error(curve: Curve, further: Callable[[Curve, Sequence[float]], Sequence[float]]) -> float:
    """Return how far the prediction at the largest k is off."""
    survival = [after - before for before, after in pairwise((1.0, *curve.tokens[:KNOWN]))]
    rates = [after / before for before, after in pairwise((1.0, *survival))]
    predicted: float = 1 + sum(accumulate(further(curve, rates), mul))
    return predicted / curve.tokens[-1] - 1


def depths(folder: Path) -> Iterable[str]:
    """Yield the errors of each curve, and their summary."""
    found = curves(folder)

    def off(curve: Curve, kept: float | None = None) -> float:
        return error(curve, lambda c, rates: rates_to(c.method, rates, len(c.tokens), kept=kept))

    rows = []
    for curve in found:
        repeated = error(curve, lambda c, rates: [*rates, *[rates[-1]] * (len(c.tokens) - KNOWN)])
        alike = [each for each in found if (each.method is Method.MTP) == (curve.method is Method.MTP)]
        others = [each for each in alike if each.file != curve.file]
        best = min(TRIED, key=lambda kept: mean(abs(off(each, kept)) for each in others))
        rows.append((repeated, off(curve), off(curve, best)))
        numbers = " | ".join(f"{each:+.1%}" for each in rows[-1])
        yield f"{curve.name} | {curve.method} | {curve.tokens[-1]:.2f} | {numbers}"
    columns = list(zip(*([abs(each) for each in row] for row in rows), strict=True))
    yield "median | | | " + " | ".join(f"{median(each):.1%}" for each in columns)
    yield "worst | | | " + " | ".join(f"{max(each):.1%}" for each in columns)
