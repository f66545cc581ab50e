"""Parsing of `--slo ttft=0.5,tpot=0.02,e2e=10`."""

from __future__ import annotations

import math

from backends.validation import UsageError

_BOUNDS = ("ttft", "tpot", "e2e")


def slo_bounds(text: str | None) -> dict[str, float]:
    """Return the bounds of `--slo` in seconds, keyed by `ttft`, `tpot` and `e2e`; empty without the option.

    Examples
    --------
    >>> slo_bounds("ttft=0.5, e2e=10")
    {'ttft': 0.5, 'e2e': 10.0}
    """
    bounds: dict[str, float] = {}
    for item in text.split(",") if text is not None else ():
        name, _, value = (part.strip() for part in item.partition("="))
        try:
            bound_s = float(value)
        except ValueError:
            raise UsageError(f"--slo {text}: write it as ttft=0.5,tpot=0.02,e2e=10, in seconds") from None
        if name not in _BOUNDS:
            raise UsageError(f"--slo {text}: unknown bound {name!r}; the bounds are {', '.join(_BOUNDS)}")
        if name in bounds:
            raise UsageError(f"--slo {text}: {name} is given twice")
        if not 0 < bound_s < math.inf:
            raise UsageError(f"--slo {text}: {name} must be a number of seconds above 0")
        bounds[name] = bound_s
    return bounds
