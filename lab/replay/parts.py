"""Parts of the requests of a trace, by what the requests were like, in which policies are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]

_MOST_KINDS = 8
_FEW = 30
_LENGTHS = {"prompt tokens": (0, 512, 2048, 8192, 32768), "answer tokens": (0, 64, 256, 1024)}
_TEMPERATURES = ((0.0, "0"), (0.5, "above 0 to 0.5"), (1.0, "above 0.5 to 1"), (np.inf, "above 1"))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the requests: by what they were chosen, its name, which are in it, and what it is in other traffic."""

    by: str
    name: str
    inside: Truths
    kind: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What the same part of other traffic has, too."""
        return self.by, self.kind or self.name


def distinguishing(candidates: Iterable[Sequence[Part]]) -> list[Part]:
    """Return the parts that have enough requests, without those of a trait that all requests share."""
    found: list[Part] = []
    for parts in candidates:
        some = [part for part in parts if part.inside.sum() >= _FEW]
        found += some if len(some) > 1 else []
    return found


def by_workload(workload: Sequence[str]) -> list[Part]:
    """Return the most frequent workloads.

    Examples
    --------
    >>> [part.name for part in by_workload(["chat", "code", "chat", ""])]
    ['chat', 'code', 'not named']
    """
    each = np.array(workload, dtype=np.str_)
    names, counts = np.unique(each, return_counts=True)
    order = sorted(range(len(names)), key=lambda index: (-counts[index], not names[index], names[index]))
    return [Part("workload", str(names[index]) or "not named", each == names[index]) for index in order[:_MOST_KINDS]]


def by_temperature(temperature: Floats) -> list[Part]:
    """Return ranges of the temperature."""
    lows = (-np.inf, *(high for high, _ in _TEMPERATURES))
    return [
        Part("temperature", name, (temperature > low) & (temperature <= high))
        for low, (high, name) in zip(lows, _TEMPERATURES, strict=False)
    ]


def by_length(by: str, tokens: npt.NDArray[np.int64] | Floats) -> list[Part]:
    """Return ranges of the length; `by` is `prompt tokens` or `answer tokens`.

    Examples
    --------
    >>> [part.name for part in by_length("answer tokens", np.array([5]))]
    ['up to 64', '65 to 256', '257 to 1,024', 'more than 1,024']
    """
    bounds = _LENGTHS[by]
    parts = []
    for low, high in zip(bounds, (*bounds[1:], np.inf), strict=True):
        name = f"more than {low:,}" if high == np.inf else f"{low + 1:,} to {high:,}" if low else f"up to {high:,}"
        parts.append(Part(by, name, (tokens > (low or -1)) & (tokens <= high)))
    return parts


def by_load(by: str, load: npt.NDArray[np.int64] | Floats) -> list[Part]:
    """Return thirds of the requests by load; NaN is in none.

    Examples
    --------
    >>> [part.name for part in by_load("in flight", np.arange(90))]
    ['up to 30', '31 to 59', 'more than 59']
    """
    if np.isnan(load).all():
        return []
    low, high = np.nanquantile(load, (1 / 3, 2 / 3)).round()
    return [
        Part(by, f"up to {low:.0f}", load <= low, "low"),
        Part(by, f"{low + 1:.0f} to {high:.0f}", (load > low) & (load <= high), "middle"),
        Part(by, f"more than {high:.0f}", load > high, "high"),
    ]
