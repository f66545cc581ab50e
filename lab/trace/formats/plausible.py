"""Units that a file does not state: the user must give them if the usual ones yield impossible values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import orjson

from backends.validation import UsageError
from lab.trace.formats.format import Units
from lab.trace.lines import BrokenLines, TraceError, entries

_ENTRIES = 1000  # to examine
_MOST_PER_S = 50.0
"""Requests per second, with times in milliseconds, beyond which the user must give the unit."""
_SIZES = tuple(2**power for power in range(3, 15))
_FEWEST = 4


def units_of(path: Path, kind: str, usual: Units, given: Units) -> Units:
    """Return the units of a file, as given, else the usual ones of its format.

    Raise if a given unit is one that the file states itself, or if an ungiven one yields impossible values.
    """
    for name, value in given._asdict().items():
        if value is not None and getattr(usual, name) is None:
            raise UsageError(f"--{name.replace('_', '-')}: a trace in {kind} says it by itself")
    units = Units(given.time_unit or usual.time_unit, given.block_tokens or usual.block_tokens)
    if units == given:
        return units
    found = []
    for _, entry in islice(entries(path, BrokenLines(lambda _: None)), _ENTRIES):
        try:
            document = orjson.loads(entry)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict):
            found.append(document)
    times = [one["timestamp"] for one in found if isinstance(one.get("timestamp"), int | float)]
    if given.time_unit is None and usual.time_unit == "ms" and len(times) > 1:
        span_s = (max(times) - min(times)) / 1000
        if 0 < span_s * _MOST_PER_S < len(times) - 1:
            rate = (len(times) - 1) / span_s
            raise TraceError(
                f"{path}: its times would be {rate:,.0f} requests a second in milliseconds, and {rate / 1000:,.3g} in "
                "seconds: say --time-unit ms or --time-unit s"
            )
    if given.block_tokens is None and usual.block_tokens is not None:
        _check_blocks(path, usual.block_tokens, [one for one in found if one.get("hash_ids")])
    return units


def _check_blocks(path: Path, usual: int, found: Sequence[dict[str, object]]) -> None:
    """Raise if prompts have more blocks than the usual size allows, or exactly as many as another size gives."""
    sizes = [
        (length, len(ids))
        for one in found
        if isinstance(length := one.get("input_length"), int) and isinstance(ids := one["hash_ids"], list)
    ]
    too_many = sum(count > -(-length // usual) for length, count in sizes)
    fitting = [size for size in _SIZES if all(count in (-(-length // size), length // size) for length, count in sizes)]
    is_other = len({count for _, count in sizes}) >= _FEWEST and fitting and usual not in fitting
    if 2 * too_many > len(sizes) or is_other:
        of = f"; blocks of {fitting[0]} would fit" if fitting else ""
        raise TraceError(f"{path}: its hash_ids are not of blocks of {usual} tokens{of}: say --block-tokens N")
