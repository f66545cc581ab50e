"""Arrival times of requests, drawn from a distribution or read from a trace."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from backends.validation import UsageError

_FRACTION = re.compile(r"(\.\d{6})\d+")  # Azure writes seven digits, one more than datetime reads
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Examples
    --------
    >>> Arrival(0.5, input_tokens=374, output_tokens=44).at_s
    0.5
    """

    at_s: float  # arrival in seconds after the first request
    input_tokens: int
    output_tokens: int


def gamma_arrivals(
    rate: float, burstiness: float, random: np.random.Generator, count: int | None, duration_s: float | None
) -> list[float]:
    """Return ascending arrival times in seconds from the start.

    Notes
    -----
    With a count alone, the intervals are scaled to a sum of exactly `count / rate`, as in `vllm bench serve`, so that
    the offered rate does not vary with the seed. With a duration, the number of arrivals is random.

    Examples
    --------
    >>> times = gamma_arrivals(4.0, 1.0, np.random.default_rng(0), count=100, duration_s=None)
    >>> len(times), round(times[-1], 6)
    (100, 25.0)
    """
    expected = count if duration_s is None else min(count or np.inf, duration_s * rate * 1.2 + 50)
    assert expected is not None
    intervals = random.gamma(burstiness, 1.0 / (rate * burstiness), int(expected))
    times = np.cumsum(intervals)
    if duration_s is None:
        return [float(time) for time in times * (len(times) / rate / times[-1])]
    while (count is None or len(times) < count) and times[-1] < duration_s:
        more = random.gamma(burstiness, 1.0 / (rate * burstiness), len(times))
        times = np.concatenate([times, times[-1] + np.cumsum(more)])[:count]
    return [float(time) for time in times[times < duration_s]]


def read_trace(path: Path) -> list[Arrival]:
    """Read a CSV with the columns TIMESTAMP (a date and time, or seconds), ContextTokens and GeneratedTokens."""
    try:
        arrivals = list(_rows(path))
    except (OSError, UnicodeDecodeError, csv.Error, EOFError) as error:
        raise UsageError(f"--trace: {path}: {error}") from None
    if not arrivals:
        raise UsageError(f"--trace: {path}: holds no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    return [Arrival(arrival.at_s - first_s, arrival.input_tokens, arrival.output_tokens) for arrival in arrivals]


def shorten(trace: list[Arrival], rate: float | None, count: int | None, duration_s: float | None) -> list[Arrival]:
    """Return the first requests of a trace, with its times stretched to a mean rate of `rate` per second if given."""
    stretch = 1.0
    if rate is not None and len(trace) > 1 and trace[-1].at_s > 0:
        stretch = (len(trace) - 1) / trace[-1].at_s / rate
    stretched = [
        Arrival(arrival.at_s * stretch, arrival.input_tokens, arrival.output_tokens) for arrival in trace[:count]
    ]
    return [arrival for arrival in stretched if duration_s is None or arrival.at_s < duration_s]


def _rows(path: Path) -> Iterator[Arrival]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig")))
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"--trace: {path}: has no column {missing[0]}; the first line must name the columns")
    for row in reader:
        try:
            lengths = [int(row[name]) for name in _COLUMNS[1:]]
            yield Arrival(_seconds(row["TIMESTAMP"]), max(1, lengths[0]), max(1, lengths[1]))
        except (ValueError, TypeError):
            raise UsageError(f"--trace: {path}:{reader.line_num}: expected a time and two whole numbers") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    moment = datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
