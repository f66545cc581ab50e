"""A trace prepared for replay in little memory: numbers in rows, long fields in a file."""

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

from lab.replay.comparison import Traits
from lab.replay.request import ReplayRequest, replay_request
from lab.replay.sessions import Order
from lab.statistics import Floats
from lab.trace import Text, TraceRecord
from policies.features.request import Endpoint, RequestFeatures

_ROW = np.dtype(
    [
        ("arrived_at", "=f8"),  # NaN if unknown
        ("temperature", "=f8"),
        ("overlap", "=f8"),
        ("code_share", "=f8"),
        ("prompt_tokens", "=i8"),
        ("output_tokens", "=i8"),
        ("max_tokens", "=i8"),  # -1: none
        ("think_s", "=f8"),  # NaN: does not wait for an answer
        ("at", "=i8"),  # offset and size of the long fields in the file
        ("length", "=i4"),
        ("turns", "=i4"),
        ("kind", "=i4"),  # index of the features that many requests share
        ("template", "=i4"),
        ("session", "=i4"),
        ("copy", "=i4"),  # 0: as in the trace
    ]
)
_PACK = struct.Struct("=4d3qdq6i").pack
_NAMES = [one.name for one in fields(RequestFeatures)]
_VALUES = attrgetter(*_NAMES)
_ROW_FEATURES = (
    "temperature", "overlap", "code_share", "prompt_tokens", "max_tokens", "turns", "template", "prefix",
    "prefix_tokens", "qps", "in_flight",
)  # fmt: skip
_ROW_FEATURE_INDICES = [_NAMES.index(name) for name in _ROW_FEATURES]
_WORKLOAD = _NAMES.index("workload")
_ROWS_AT_ONCE = 4096
_BLOCK = 32
"""Requests that are drawn together, so that bursts stay bursts."""
_BLOCK_BITS = 2**62 - 1
_OF_COPY = 0x9E3779B97F4A7C15
"""Factor that gives each copy of a session its own bits of block numbers; the golden ratio of 2^64."""

LongFields = tuple[dict[str, Sequence[int] | float], Text | None, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Acceptance, text, the engine's prefix blocks, and `prefix` and `prefix_tokens` of the features."""


class RequestTable(Sequence[ReplayRequest]):
    """Requests in order of arrival, each built on access.

    Takes about 100 bytes per request, regardless of texts. It can be pickled for other processes on this machine within
    the `request_table` block that created it.
    """

    def __init__(
        self,
        rows: npt.NDArray[Any],
        arrived_s: Floats,
        kinds: Sequence[tuple[Any, ...]],
        templates: Sequence[str],
        sessions: Sequence[str],
        long: _LongFieldsFile,
    ) -> None:
        self._rows = rows
        self._arrived_s = arrived_s
        self._kinds, self._templates, self._sessions, self._long_fields = kinds, templates, sessions, long
        self._shared = kinds, templates, sessions, long

    @property
    def arrived_at(self) -> Floats:
        """Arrival times of the trace in seconds, NaN if unknown; shape (requests,)."""
        times: Floats = self._rows["arrived_at"]
        return times

    @property
    def traits(self) -> Traits:
        """What the requests were like."""
        workloads = [str(kind[_WORKLOAD]) for kind in self._kinds]
        return Traits(
            [workloads[kind] for kind in self._rows["kind"].tolist()],
            self._rows["temperature"],
            self._rows["prompt_tokens"],
        )

    @property
    def order(self) -> Order:
        """When the requests are sent."""
        numbers = self._rows["session"].astype(np.int64)
        sessions = np.where(numbers < 0, -1, numbers + self._rows["copy"] * (1 + numbers.max(initial=0)))
        return Order(self._arrived_s, self._rows["think_s"], sessions.tolist())

    def in_sessions(self, rate: float | None, speed: float, copies: int, seed: int) -> RequestTable:
        """Return the requests of sessions that begin at other times, in nominal order of arrival.

        A nominal arrival is as long after the beginning of its session as in the trace.
        """
        rows = np.tile(self._rows, copies)
        rows["copy"] = np.repeat(np.arange(copies), len(self._rows))
        arrived_at = np.nan_to_num(rows["arrived_at"])
        played = RequestTable(rows, arrived_at, *self._shared)
        session, first = played._session_numbers()
        begun_at = np.full(len(first), np.inf)
        np.minimum.at(begun_at, session, arrived_at)
        if rate is None:
            begins_s = (begun_at - begun_at.min()) / speed
        else:
            rng = np.random.default_rng(seed)
            begins_s = rng.permutation(np.cumsum(rng.exponential(len(rows) / len(first) / rate, len(first))))
        arrived_s = begins_s[session] + arrived_at - begun_at[session]
        in_order = np.argsort(arrived_s, kind="stable")
        return RequestTable(rows[in_order], arrived_s[in_order], *self._shared)

    def paced(self, arrived_s: Floats) -> RequestTable:
        """Return the same requests with other arrival times, ascending, shape (requests,)."""
        return RequestTable(self._rows, arrived_s, *self._shared)

    def resampled(self, seed: int) -> RequestTable:
        """Return other traffic like this: blocks of it, or whole sessions with think times, drawn with replacement.

        Each is from the same part of the trace, an eighth of it to either side, so that a busy hour stays one. A block
        keeps the order of its requests and the gaps between them.

        References
        ----------
        Paparoditis and Politis, "Local Block Bootstrap", Comptes Rendus Mathematique 335(11), 2002.
        """
        rng = np.random.default_rng((seed, len(self)))
        if self.order.is_open:
            count = len(self)
            length = min(_BLOCK, count)
            starts = _drawn(np.arange(0, count, length), count - length + 1, count // 8, rng)
            drawn = (starts[:, None] + np.arange(length)).ravel()[:count]
            gaps_s = np.diff(self._arrived_s, prepend=self._arrived_s[0])
            gaps_s[0] = gaps_s.mean()
            return RequestTable(self._rows[drawn], np.cumsum(gaps_s[drawn]), *self._shared)
        session, first = self._session_numbers()
        by_time = np.argsort(self._arrived_s[first], kind="stable")
        chosen = by_time[_drawn(np.arange(len(first)), len(first), len(first) // 8, rng)]
        members = np.split(np.argsort(session, kind="stable"), np.cumsum(np.bincount(session))[:-1])
        drawn = np.concatenate([members[one] for one in chosen])
        sizes = [len(members[one]) for one in chosen]
        rows = self._rows[drawn]
        rows["copy"] = np.repeat(np.arange(len(chosen)), sizes)
        moved_s = np.repeat(self._arrived_s[first[by_time]] - self._arrived_s[first[chosen]], sizes)
        arrived_s = self._arrived_s[drawn] + moved_s
        in_order = np.argsort(arrived_s, kind="stable")
        return RequestTable(rows[in_order], arrived_s[in_order], *self._shared)

    def _session_numbers(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the session of each request, those without one alone, and the first request of each session."""
        numbers = np.array(self.order.sessions)
        alone = numbers < 0
        numbers[alone] = numbers.max(initial=0) + 1 + np.arange(np.count_nonzero(alone))
        _, first, session = np.unique(numbers, return_index=True, return_inverse=True)
        return session, first

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ReplayRequest: ...
    @overload
    def __getitem__(self, index: slice) -> RequestTable: ...
    def __getitem__(self, index: int | slice) -> ReplayRequest | RequestTable:
        if isinstance(index, slice):
            rows, arrived_s = self._rows[index], self._arrived_s[index]
            return RequestTable(rows, arrived_s, *self._shared)
        return self._request(float(self._arrived_s[index]), self._rows[index].item())

    def __iter__(self) -> Iterator[ReplayRequest]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            batch = slice(start, start + _ROWS_AT_ONCE)
            yield from map(self._request, self._arrived_s[batch].tolist(), self._rows[batch].tolist())

    def _request(self, arrived_s: float, row: tuple[Any, ...]) -> ReplayRequest:
        _, temperature, overlap, code_share, prompt, output, max_tokens, think_s, at = row[:9]
        length, turns, kind, template, session, copy = row[9:]
        acceptance, text, blocks, prefix, prefix_tokens = self._long_fields.read(at, length) if length else _NOTHING
        if copy:
            own = copy * _OF_COPY & _BLOCK_BITS
            blocks, prefix = tuple([block ^ own for block in blocks]), tuple([block ^ own for block in prefix])
        values = list(self._kinds[kind])
        of_row = (
            temperature, overlap, code_share, prompt, None if max_tokens < 0 else max_tokens, turns,
            self._templates[template], prefix, prefix_tokens, 0.0, 0,
        )  # fmt: skip
        for index, value in zip(_ROW_FEATURE_INDICES, of_row, strict=True):
            values[index] = value
        features, think = RequestFeatures(*values), None if math.isnan(think_s) else think_s
        of = "" if session < 0 else f"{self._sessions[session]}#{copy}" if copy else self._sessions[session]
        return ReplayRequest(arrived_s, features, prompt or 1, output, acceptance, text, blocks, of, think)


def _drawn(places: npt.NDArray[np.int64], count: int, reach: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return a number below `count` for each place, at most `reach` from it."""
    low = np.clip(places - reach, 0, count - 1)
    return rng.integers(low, np.clip(places + reach, 0, count - 1) + 1)


@contextmanager
def request_table(records: Iterable[TraceRecord], default_temperature: float) -> Iterator[RequestTable]:
    """Read records in any order into a table that is valid within the block.

    Requests are sorted by arrival, those without a time first; the sort is stable. Until the table is `paced`, all
    requests arrive at time 0.
    """
    with tempfile.TemporaryDirectory(prefix="gateway-trace-") as folder:
        path = Path(folder) / "long"
        rows = bytearray()
        kinds: dict[tuple[Any, ...], int] = {}
        templates: dict[str, int] = {}
        sessions: dict[str, int] = {}
        with path.open("wb") as file:
            end = 0
            for record in records:
                if record.endpoint == Endpoint.OTHER:  # takes an engine, but not as inference does
                    continue
                request = replay_request(record, 0.0, default_temperature)
                features = request.features
                long = _packed_long_fields(request)
                if long:
                    file.write(long)
                kind = list(_VALUES(features))
                for index in _ROW_FEATURE_INDICES:
                    kind[index] = None
                rows += _PACK(
                    math.nan if record.arrived_at is None else record.arrived_at,
                    features.temperature,
                    features.overlap,
                    features.code_share,
                    features.prompt_tokens,
                    request.output_tokens,
                    -1 if features.max_tokens is None else features.max_tokens,
                    math.nan if request.think_s is None else request.think_s,
                    end,
                    len(long),
                    features.turns,
                    kinds.setdefault(tuple(kind), len(kinds)),
                    templates.setdefault(features.template, len(templates)),
                    sessions.setdefault(request.session, len(sessions)) if request.session else -1,
                    0,
                )
                end += len(long)
        table = np.frombuffer(rows, _ROW)
        times = np.where(np.isnan(table["arrived_at"]), -math.inf, table["arrived_at"])
        if (times[1:] < times[:-1]).any():
            table = table[np.argsort(times, kind="stable")]
        yield RequestTable(
            table, np.zeros(len(table)), list(kinds), list(templates), list(sessions), _LongFieldsFile(path)
        )


def _packed_long_fields(request: ReplayRequest) -> bytes:
    """Return the pickled long fields of a request; empty if it has none."""
    features = request.features
    long = (dict(request.acceptance), request.text, request.prefix_blocks, features.prefix, features.prefix_tokens)
    return b"" if long == _NOTHING else pickle.dumps(long, pickle.HIGHEST_PROTOCOL)


class _LongFieldsFile:
    """The file of fields that are too long for a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: mmap.mmap | None = None

    def read(self, at: int, length: int) -> LongFields:
        if self._mapped is None:
            with self._path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        long: LongFields = pickle.loads(self._mapped[at : at + length])  # noqa: S301 -- written above, by this process
        return long

    def __getstate__(self) -> Path:
        return self._path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]


_NOTHING: LongFields = ({}, None, (), (), ())
