"""What a format of traces is: how its entries are recognised, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lab.trace.decode import decode
from lab.trace.lines import BrokenLine, Report, entries
from lab.trace.record import TraceRecord


class Units(NamedTuple):
    """What a file does not say of its own numbers; None for what it says, or what is not given."""

    time_unit: str | None = None  # `s` or `ms`
    block_tokens: int | None = None

    @property
    def per_s(self) -> float:
        """How many units of time a second has."""
        return 1000.0 if self.time_unit == "ms" else 1.0


Reader = Callable[[Path, Report, Units], Iterator[TraceRecord]]
Convert = Callable[[dict[str, Any]], dict[str, Any]]


class Format(NamedTuple):
    """A format of traces."""

    read: Reader
    has: Callable[[Mapping[str, Any]], bool] = lambda _: False  # whether an object, by all its keys, is of the format
    usual: Units = Units()  # of what its files do not say


def of_entries(begin: Callable[[Units], Convert]) -> Reader:
    """Return the reader of a format in which each entry is a request; `begin` returns what gives it a record's keys."""

    def read(path: Path, report: Report, units: Units) -> Iterator[TraceRecord]:
        convert = begin(units)
        for number, entry in entries(path, report):
            try:
                yield decode(convert(orjson.loads(entry)), number)
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                report(BrokenLine(path, number, why(error)))

    return read


def why(error: Exception) -> str:
    """Return what is wrong with an entry."""
    if isinstance(error, orjson.JSONDecodeError):
        return f"not JSON: {error}"
    return f"has no {error}" if isinstance(error, KeyError) else str(error)
