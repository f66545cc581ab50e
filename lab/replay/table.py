"""A trace ready to be played, of a million requests in little memory: numbers in rows, the rest in a file."""

from __future__ import annotations

import math
import mmap
import pickle
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from lab.replay.request import ReplayRequest, replay_request
from lab.trace import Text, TraceRecord
from policies.features.request import RequestFeatures

Floats = npt.NDArray[np.float64]

_ROW = np.dtype(
    [
        ("arrived_at", "=f8"),  # NaN where the trace does not tell
        ("temperature", "=f8"),
        ("overlap", "=f8"),
        ("code_share", "=f8"),
        ("prompt_tokens", "=i8"),
        ("output_tokens", "=i8"),
        ("max_tokens", "=i8"),  # -1: none
        ("at", "=i8"),  # in the file, and how many bytes there
        ("length", "=i4"),
        ("turns", "=i4"),
        ("kind", "=i4"),  # what features have in common with others, by its place
        ("template", "=i4"),
    ]
)
_PACK = struct.Struct("=4d4q4i").pack
_NAMES = [one.name for one in fields(RequestFeatures)]
_VALUES = attrgetter(*_NAMES)
_OF_A_ROW = (
    "temperature", "overlap", "code_share", "prompt_tokens", "max_tokens", "turns", "template", "prefix",
    "prefix_tokens", "qps", "in_flight",
)  # fmt: skip
_PLACES = [_NAMES.index(name) for name in _OF_A_ROW]
_AT_ONCE = 4096

Long = tuple[dict[str, Sequence[int] | float], Text | None, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Acceptance, text, the engine's prefix blocks, and `prefix` and `prefix_tokens` of the features."""


class RequestTable(Sequence[ReplayRequest]):
    """Requests in order of arrival; each is made when it is asked for, and none is kept.

    Takes some 100 bytes a request, whatever texts there are. It can be pickled for other processes of this machine
    while the block of `tabulated` that it comes from lasts.
    """

    def __init__(
        self,
        rows: npt.NDArray[Any],
        arrived_s: Floats,
        kinds: Sequence[tuple[Any, ...]],
        templates: Sequence[str],
        long: _Long,
    ) -> None:
        self._rows = rows
        self._arrived_s = arrived_s
        self._kinds, self._templates, self._long = kinds, templates, long

    @property
    def arrived_at(self) -> Floats:
        """When each came by the trace's own clock, in seconds; NaN where the trace does not tell. Shape (requests,)."""
        found: Floats = self._rows["arrived_at"]
        return found

    def paced(self, arrived_s: Floats) -> RequestTable:
        """Return the same requests with other times, ascending; shape (requests,)."""
        return RequestTable(self._rows, arrived_s, self._kinds, self._templates, self._long)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> ReplayRequest: ...
    @overload
    def __getitem__(self, place: slice) -> RequestTable: ...
    def __getitem__(self, place: int | slice) -> ReplayRequest | RequestTable:
        if isinstance(place, slice):
            rows, arrived_s = self._rows[place], self._arrived_s[place]
            return RequestTable(rows, arrived_s, self._kinds, self._templates, self._long)
        return self._request(float(self._arrived_s[place]), self._rows[place].item())

    def __iter__(self) -> Iterator[ReplayRequest]:
        for start in range(0, len(self), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            yield from map(self._request, self._arrived_s[some].tolist(), self._rows[some].tolist())

    def _request(self, arrived_s: float, row: tuple[Any, ...]) -> ReplayRequest:
        _, temperature, overlap, code_share, prompt, output, most, at, length, turns, kind, template = row
        acceptance, text, blocks, prefix, prefix_tokens = self._long.read(at, length) if length else _NOTHING
        values = list(self._kinds[kind])
        told = (
            temperature, overlap, code_share, prompt, None if most < 0 else most, turns, self._templates[template],
            prefix, prefix_tokens, 0.0, 0,
        )  # fmt: skip
        for place, value in zip(_PLACES, told, strict=True):
            values[place] = value
        return ReplayRequest(arrived_s, RequestFeatures(*values), prompt or 1, output, acceptance, text, blocks)


@contextmanager
def tabulated(records: Iterable[TraceRecord], default_temperature: float) -> Iterator[RequestTable]:
    """Read records, in any order, into a table that lasts as long as the block.

    Requests that came at the same time, and those without a time, which come first, stay as they are. Until the table
    is `paced`, they arrive all at once.
    """
    with tempfile.TemporaryDirectory(prefix="gateway-trace-") as folder:
        path = Path(folder) / "long"
        rows = bytearray()
        kinds: dict[tuple[Any, ...], int] = {}
        templates: dict[str, int] = {}
        with path.open("wb") as file:
            end = 0
            for record in records:
                request = replay_request(record, 0.0, default_temperature)
                features = request.features
                long = _long_of(request)
                if long:
                    file.write(long)
                kind = list(_VALUES(features))
                for place in _PLACES:
                    kind[place] = None
                rows += _PACK(
                    math.nan if record.arrived_at is None else record.arrived_at,
                    features.temperature,
                    features.overlap,
                    features.code_share,
                    features.prompt_tokens,
                    request.output_tokens,
                    -1 if features.max_tokens is None else features.max_tokens,
                    end,
                    len(long),
                    features.turns,
                    kinds.setdefault(tuple(kind), len(kinds)),
                    templates.setdefault(features.template, len(templates)),
                )
                end += len(long)
        found = np.frombuffer(rows, _ROW)
        times = np.where(np.isnan(found["arrived_at"]), -math.inf, found["arrived_at"])
        if (times[1:] < times[:-1]).any():
            found = found[np.argsort(times, kind="stable")]
        yield RequestTable(found, np.zeros(len(found)), list(kinds), list(templates), _Long(path))


def _long_of(request: ReplayRequest) -> bytes:
    """Return what is too long for a row; nothing where there is nothing."""
    features = request.features
    long = (dict(request.acceptance), request.text, request.prefix_blocks, features.prefix, features.prefix_tokens)
    return b"" if long == _NOTHING else pickle.dumps(long, pickle.HIGHEST_PROTOCOL)


class _Long:
    """The file of what is too long for a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: mmap.mmap | None = None

    def read(self, at: int, length: int) -> Long:
        if self._mapped is None:
            with self._path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        long: Long = pickle.loads(self._mapped[at : at + length])  # noqa: S301 -- written above, by this process
        return long

    def __getstate__(self) -> Path:
        return self._path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]


_NOTHING: Long = ({}, None, (), (), ())
