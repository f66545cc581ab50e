"""A format of traces: how to recognize and read its entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lab.trace.decode import decode
from lab.trace.lines import BrokenLine, Report, entries
from lab.trace.record import TraceRecord


class Units(NamedTuple):
    """Units of a file's numbers that the file itself does not state; None: stated, or not given."""

    time_unit: str | None = None  # `s` or `ms`
    block_tokens: int | None = None

    @property
    def per_s(self) -> float:
        """Units of time per second."""
        return 1000.0 if self.time_unit == "ms" else 1.0


Reader = Callable[[Path, Report, Units], Iterator[TraceRecord]]
Convert = Callable[[dict[str, Any]], dict[str, Any]]


class Format(NamedTuple):
    """A format of traces."""

    read: Reader
    has: Callable[[Mapping[str, Any]], bool] = lambda _: False  # whether an object's keys are of this format
    usual: Units = Units()  # the usual units, if its files state none


def of_entries(begin: Callable[[Units], Convert]) -> Reader:
    """Return a reader for formats whose entries are requests; `begin` returns the converter to a record's keys."""

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
