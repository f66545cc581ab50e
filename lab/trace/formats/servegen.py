"""ServeGen's client models: for windows of a day, the rate and burstiness of a client and the lengths of its requests.

A model is two files, `chunk-N-trace.csv` and `chunk-N-dataset.json`. Reading it draws a trace, the same each time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import gamma, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from lab.trace.lines import MAX_LINE_BYTES, BrokenLine, Report, TraceError, numbered_lines, open_unpacked, read_errors
from lab.trace.record import TraceRecord
from lab.trace.values import read_time

WINDOW_S = 600.0
"""Seconds of a window that no other follows."""

_NUMBER = rb"\s*(?:\d+\.?\d*(?:[eE][+-]?\d+)?|nan|)\s*"
_ROW = re.compile(rb"\s*\d+\.?\d*\s*,%b,%b,\s*(?:Gamma|Weibull|)\s*(?:,.*)?" % (_NUMBER, _NUMBER), re.DOTALL)
_MODEL = re.compile(r"-trace(?=\.csv)")
_MOST_REQUESTS = 1_000_000  # of a window
_LONGEST = 1 << 24  # tokens
_PROMPT, _OUTPUT = ("input_tokens", "text_tokens"), "output_tokens"
_PAIR = re.compile(r"\s*([^:,{}]+):\s*([^:,{}]+)\s*")

Floats = npt.NDArray[np.float64]


def is_servegen(line: bytes) -> bool:
    """Return whether a line is a window of a client model: start, rate, variation, distribution and its parameters.

    Examples
    --------
    >>> is_servegen(b"0,1.5,0.8,Gamma,2.0,300"), is_servegen(b"TIMESTAMP,ContextTokens")
    (True, False)
    """
    return _ROW.fullmatch(line.strip()) is not None


def is_dataset(path: Path) -> bool:
    """Return whether a file holds the lengths of a client model beside it, and no requests of its own."""
    trace = path.name.replace("-dataset.json", "-trace.csv")
    return trace != path.name and path.with_name(trace).exists()


@dataclass(frozen=True, slots=True)
class _Window:
    """Requests per second between two times; `shape` of the distribution of the gaps, 1 for a Poisson process."""

    number: int
    begin_s: float
    rate: float
    weibull: bool
    shape: float


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Values with their cumulative probabilities, shape (values,)."""

    values: npt.NDArray[np.int64]
    cumulative: Floats

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Return values drawn by their shares, shape (count,)."""
        at = np.searchsorted(self.cumulative, rng.random(count) * self.cumulative[-1], side="right")
        drawn: npt.NDArray[np.int64] = self.values[np.minimum(at, len(self.values) - 1)]
        return drawn


def read_servegen(path: Path, report: Report) -> Iterator[TraceRecord]:
    """Draw the requests of a client.

    Arrivals are a renewal process with the distribution of each window, run at its rate; prompt and answer lengths are
    drawn from the window's frequencies, independently, since only these are published. The draws depend on the name
    of the file alone.
    """
    lengths = _lengths(path)
    starts = sorted(lengths)
    client = path.name.split(".")[0].removesuffix("-trace")
    rng = np.random.default_rng(list(client.encode()))
    windows = list(_windows(path, report))
    number = 0
    left = rng.random()  # expected requests until the next one
    for window, following in zip(windows, [*windows[1:], None], strict=False):
        until_s = window.begin_s + WINDOW_S if following is None else following.begin_s
        count = window.rate * (until_s - window.begin_s)
        if count > _MOST_REQUESTS:
            why = f"{count:.3g} requests between two times; at most {_MOST_REQUESTS:,}"
            report(BrokenLine(path, window.number, why))
        if not 0 < count <= _MOST_REQUESTS:
            continue
        at, left = _arrivals(rng, window, count, left)
        prompts, outputs = lengths[starts[max(0, bisect_right(starts, window.begin_s) - 1)]]
        drawn = (window.begin_s + at / window.rate, prompts.draw(rng, len(at)), outputs.draw(rng, len(at)))
        for arrived_at, prompt_tokens, output_tokens in zip(*(column.tolist() for column in drawn), strict=True):
            number += 1
            yield TraceRecord(
                id=f"{client}/{number}",
                arrived_at=arrived_at,
                key=client,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )


def _arrivals(rng: np.random.Generator, window: _Window, count: float, left: float) -> tuple[Floats, float]:
    """Return arrivals in units of expected requests from the window's begin, and what is left until the next one."""
    arrivals: list[Floats] = []
    at = left
    while at < count:
        size = int(count - at) + 16
        if window.weibull:
            gaps = rng.weibull(window.shape, size) / gamma(1 + 1 / window.shape)
        else:
            gaps = rng.gamma(window.shape, 1 / window.shape, size)
        steps = np.concatenate([[at], at + np.cumsum(gaps)])
        arrivals.append(steps[:-1][steps[:-1] < count])
        at = float(steps[-1]) if steps[-1] < count else float(steps[np.searchsorted(steps, count)])
    return (np.concatenate(arrivals) if arrivals else np.empty(0)), at - count


def _windows(path: Path, report: Report) -> Iterator[_Window]:
    """Yield the windows in order of time."""
    last_s = -1.0
    for number, line in numbered_lines(path, report):
        parts = [part.strip() for part in line.decode("utf-8", "replace").split(",")]
        try:
            begin_s, rate = float(parts[0]), float(parts[1] or 0)
            pattern = parts[3] if len(parts) > 3 else ""
            shape = float(parts[4]) if pattern and len(parts) > 4 and parts[4] else 1.0
        except (ValueError, IndexError):
            report(BrokenLine(path, number, "expected start, rate, variation, Gamma or Weibull, shape and scale"))
            continue
        if rate < 0 or not (begin_s > last_s and isfinite(begin_s) and 0.01 <= shape <= 1000.0):
            report(
                BrokenLine(
                    path,
                    number,
                    "expected a start after that of the line before, a rate of 0 or more, a shape of 0.01 to 1000",
                )
            )
            continue
        last_s = begin_s
        yield _Window(number, begin_s, rate if isfinite(rate) else 0.0, pattern == "Weibull", shape)


def _lengths(path: Path) -> dict[float, tuple[_Lengths, _Lengths]]:
    """Return prompt and output lengths by the begin of their window, without windows that have none."""
    file = path.with_name(_MODEL.sub("-dataset", path.name).replace(".csv", ".json"))
    if file == path or not file.is_file():
        raise TraceError(f"{path}: a client model is a file chunk-N-trace.csv with chunk-N-dataset.json beside it")
    try:
        with open_unpacked(file) as unpacked:
            content = unpacked.read(MAX_LINE_BYTES + 1)
        return _by_window(content)
    except read_errors() as error:
        raise TraceError(f"{file}: {error}") from None
    except ValueError as error:
        raise TraceError(f"{file}: {error}") from None


def _by_window(content: bytes) -> dict[float, tuple[_Lengths, _Lengths]]:
    if len(content) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    document = orjson.loads(content)
    if not isinstance(document, dict) or not all(isinstance(window, dict) for window in document.values()):
        raise ValueError("expected an object with an object for each window")
    lengths = {}
    for begin, window in document.items():
        prompts = _read(next((window[name] for name in _PROMPT if window.get(name)), None))
        outputs = _read(window.get(_OUTPUT))
        if prompts is not None and outputs is not None:
            lengths[read_time(begin)] = prompts, outputs
    if not lengths:
        raise ValueError(f"no window has the frequencies of {_PROMPT[0]} (or {_PROMPT[1]}) and {_OUTPUT}")
    return lengths


def _read(frequencies: Any) -> _Lengths | None:
    """Read frequencies by length, an object or its text as Python prints it; None if there are none."""
    if not frequencies:
        return None
    pairs = frequencies if isinstance(frequencies, dict) else dict(_PAIR.findall(str(frequencies).strip("{} ")))
    if isinstance(frequencies, str) and len(pairs) != frequencies.count(":"):
        raise ValueError(f"expected frequencies as {{length: share, ...}}, not {frequencies[:40]!r}")
    try:
        numbers = sorted((float(length), float(share)) for length, share in pairs.items())
    except TypeError:
        raise ValueError("lengths and their shares must be numbers") from None
    if not numbers:
        return None
    lengths, shares = (np.array(column) for column in zip(*numbers, strict=True))
    if not ((lengths >= 0) & (lengths <= _LONGEST)).all():  # also if one is NaN
        raise ValueError(f"lengths must be 0 to {_LONGEST} tokens")
    if not ((shares >= 0) & (shares <= 1e9)).all() or shares.sum() <= 0:
        raise ValueError("shares must be 0 or more, with a sum above 0")
    return _Lengths(lengths.astype(np.int64), np.cumsum(shares))
