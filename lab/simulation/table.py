"""A trace prepared for replay in little memory: rows with the fields to sort and draw by, requests in a file."""

from __future__ import annotations

import math
import mmap
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt

from lab.simulation.outcomes import NO_OUTCOME, Outcomes, TableFacts
from lab.simulation.request import ENDPOINTS, ReplayRequest, replay_request
from lab.simulation.sessions import Order
from lab.statistics import Floats
from lab.trace.record import TraceRecord
from policies.features.request import RequestFeatures

_ROW = np.dtype(
    [
        ("arrived_at", "=f8"),  # NaN if unknown
        ("temperature", "=f8"),
        ("prompt_tokens", "=i8"),
        ("think_s", "=f8"),  # NaN: does not wait for an answer
        ("output_tokens", "=i8"),
        ("workload", "=i4"),  # index
        ("session", "=i4"),  # -1: a request of its own
        ("at", "=i8"),  # offset and size of the request in the file
        ("length", "=i4"),
        ("copy", "=i4"),  # 0: as in the trace
        ("replica", "=i4"),  # index; -1 if no replica served it
        ("waited_s", "=f4"),
        ("cached_tokens", "=i4"),
        ("ttft_s", "=f8"),  # NaN if unknown, like those below
        ("e2e_s", "=f8"),
        ("tokens_per_step", "=f4"),
    ]
)
_NAMES = [one.name for one in fields(RequestFeatures)]
_FEATURES = attrgetter(*[name.replace("endpoint", "endpoint.value") for name in _NAMES])  # enums are slow to unpickle
_REST = attrgetter(
    "prompt_tokens", "output_tokens", "acceptance", "text", "prefix_blocks", "session", "think_s", "drafted"
)
_PREFIX, _TEMPLATE, _WORKLOAD = (_NAMES.index(name) for name in ("prefix", "template", "workload"))
_ROWS_AT_ONCE = 4096
_BLOCK, _BLOCKS = 32, 16
"""Requests drawn together, so that bursts stay bursts, and the fewest blocks of a short trace."""
_REACH = 4
"""Least blocks or sessions to either side to draw from: with fewer, a short trace would repeat itself."""
_BLOCK_BITS = 2**62 - 1
_OF_COPY = 0x9E3779B97F4A7C15
"""Factor that gives each copy of a session its own block numbers; the golden ratio of 2^64."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of a trace's requests; each field has one entry per request."""

    workload: Sequence[str]
    temperature: Floats
    prompt_tokens: npt.NDArray[np.int64]


class RequestTable(Sequence[ReplayRequest]):
    """Requests in order of arrival, each built on access.

    Takes about 110 bytes per request, regardless of texts. Within the `request_table` block that created it, it can be
    pickled for other processes on this machine.
    """

    def __init__(self, rows: npt.NDArray[Any], arrived_s: Floats, known: TableFacts, file: _File) -> None:
        self._rows = rows
        self._arrived_s = arrived_s
        self._shared = self._known, self._file = known, file

    @property
    def arrived_at(self) -> Floats:
        """Arrival times of the trace in seconds, NaN if unknown; shape (requests,)."""
        times: Floats = self._rows["arrived_at"]
        return times

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt plus output, shape (requests,)."""
        tokens: npt.NDArray[np.int64] = self._rows["prompt_tokens"] + self._rows["output_tokens"]
        return tokens

    @property
    def traits(self) -> Traits:
        """The traits of the requests."""
        names = list(self._known.workloads)
        workloads = [names[one] for one in self._rows["workload"].tolist()]
        return Traits(workloads, self._rows["temperature"], self._rows["prompt_tokens"])

    @property
    def order(self) -> Order:
        """When the requests are sent."""
        numbers = self._rows["session"].astype(np.int64)
        sessions = np.where(numbers < 0, -1, numbers + self._rows["copy"] * (1 + numbers.max(initial=0)))
        return Order(self._arrived_s, self._rows["think_s"], sessions.tolist())

    @property
    def assumed(self) -> list[str]:
        """The requests of the trace that were left out, and the assumptions about what the others lack."""
        return self._known.assumed

    @property
    def folder(self) -> Path:
        """The folder of the table's file, which is removed with it."""
        return self._file.path.parent

    @property
    def outcomes(self) -> Outcomes:
        """The outcomes of the requests."""
        rows = self._rows
        columns = (rows[name].astype(float) for name in _OUTCOMES)
        sent_at = rows["arrived_at"] + rows["waited_s"]
        return Outcomes(list(self._known.replicas), rows["replica"].astype(np.int64), sent_at, *columns)

    def as_sent(self, chosen: npt.NDArray[np.int64]) -> RequestTable:
        """Return some of the requests at the times when replicas got them, ignoring sessions."""
        rows = self._rows[chosen]
        rows["think_s"], rows["session"] = math.nan, -1
        sent_at = rows["arrived_at"] + rows["waited_s"]
        in_order = np.argsort(sent_at, kind="stable")
        return RequestTable(rows[in_order], sent_at[in_order] - sent_at.min(initial=math.inf), *self._shared)

    def in_sessions(self, rate: float | None, speed: float, copies: int, seed: int) -> RequestTable:
        """Return the requests of sessions that start at other times, in nominal order of arrival.

        A nominal arrival is as long after the start of its session as in the trace.
        """
        rows = np.tile(self._rows, copies)
        rows["copy"] = np.repeat(np.arange(copies), len(self._rows))
        arrived_at = np.nan_to_num(rows["arrived_at"])
        played = RequestTable(rows, arrived_at, *self._shared)
        session, first = played._session_numbers()
        begun_at = np.full(len(first), np.inf)
        np.minimum.at(begun_at, session, arrived_at)
        if rate is None:
            missing = int(np.isnan(rows["arrived_at"][first]).sum())
            if missing:
                raise ValueError(
                    f"{missing:,} of {len(first):,} sessions have no time at which they begin; give --rate"
                )
            if len(first) > 1 and begun_at.max() <= begun_at.min():
                raise ValueError(f"all {len(first):,} sessions begin at the same time; give --rate")
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

    @property
    def is_one(self) -> bool:
        """Whether it is a single request or session, from which no other traffic can be drawn."""
        return len(self) < 2 or (not self.order.is_open and len(self._session_numbers()[1]) < 2)

    def resampled(self, seed: int) -> RequestTable:
        """Return other traffic like this: blocks of it, or whole sessions with think times, drawn with replacement.

        Each comes from the same part of the trace, an eighth of it to either side, so that a busy hour stays one. A
        block keeps the order of its requests and the gaps between them; it is much shorter than the part it is drawn
        from, or all draws would be alike.

        References
        ----------
        Paparoditis and Politis, "Local Block Bootstrap", Comptes Rendus Mathematique 335(11), 2002.
        """
        rng = np.random.default_rng((seed, len(self)))
        if self.order.is_open:
            count = len(self)
            length = min(_BLOCK, max(1, count // _BLOCKS))
            starts = _drawn(np.arange(0, count, length), count - length + 1, rng)
            drawn = (starts[:, None] + np.arange(length)).ravel()[:count]
            gaps_s = np.diff(self._arrived_s, prepend=self._arrived_s[0])
            gaps_s[0] = gaps_s.mean()
            return RequestTable(self._rows[drawn], np.cumsum(gaps_s[drawn]), *self._shared)
        session, first = self._session_numbers()
        by_time = np.argsort(self._arrived_s[first], kind="stable")
        chosen = by_time[_drawn(np.arange(len(first)), len(first), rng)]
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
        """Return each request's session, its own if it has none, and the first request of each session."""
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
    def __getitem__(self, index: slice | npt.NDArray[np.bool_]) -> RequestTable: ...
    def __getitem__(self, index: int | slice | npt.NDArray[np.bool_]) -> ReplayRequest | RequestTable:
        if isinstance(index, slice | np.ndarray):
            return RequestTable(self._rows[index], self._arrived_s[index], *self._shared)
        return self._request(float(self._arrived_s[index]), self._rows[index].item())

    def __iter__(self) -> Iterator[ReplayRequest]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            batch = slice(start, start + _ROWS_AT_ONCE)
            yield from map(self._request, self._arrived_s[batch].tolist(), self._rows[batch].tolist())

    def _request(self, arrived_s: float, row: tuple[Any, ...]) -> ReplayRequest:
        at, length, copy = row[_AT : _AT + 3]
        features, (prompt, output, acceptance, text, blocks, session, think_s, drafted) = self._file.read(at, length)
        if copy:
            own = copy * _OF_COPY & _BLOCK_BITS
            features = list(features)
            blocks, features[_PREFIX] = (tuple([one ^ own for one in each]) for each in (blocks, features[_PREFIX]))
            session = f"{session}#{copy}" if session else ""
        if self._known.accepted:
            acceptance = self._known.completed(acceptance, text, features[_TEMPLATE], features[_WORKLOAD], at)
        model, endpoint, *others = features
        known = RequestFeatures(model, ENDPOINTS[endpoint], *others)
        drafted = self._known.drafted | drafted
        return ReplayRequest(arrived_s, known, prompt, output, acceptance, text, blocks, session, think_s, drafted)


def _drawn(places: npt.NDArray[np.int64], count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return a random number below `count` for each place, within an eighth of them to either side."""
    reach = max(_REACH, count // 8)
    low = np.clip(places - reach, 0, count - 1)
    return rng.integers(low, np.clip(places + reach, 0, count - 1) + 1)


@contextmanager
def request_table(records: Iterable[TraceRecord], default_temperature: float) -> Iterator[RequestTable]:
    """Read records in any order into a table that is valid within the block.

    A stable sort orders requests by arrival, those without a time first. Until the table is `paced`, all requests
    arrive at time 0.
    """
    known = TableFacts(default_temperature)
    with tempfile.TemporaryDirectory(prefix="gateway-trace-") as folder:
        path = Path(folder) / "requests"
        with path.open("wb") as file:
            table = np.fromiter(_written(records, default_temperature, known, file), _ROW)
        if known.have_all_failed:
            raise ValueError("every request of the trace failed, so there are no answers to play")
        times = np.where(np.isnan(table["arrived_at"]), -math.inf, table["arrived_at"])
        if (times[1:] < times[:-1]).any():
            table = table[np.argsort(times, kind="stable")]
        yield RequestTable(table, np.zeros(len(table)), known, _File(path))


def _written(
    records: Iterable[TraceRecord], default_temperature: float, known: TableFacts, file: IO[bytes]
) -> Iterator[tuple[Any, ...]]:
    """Write the records' requests to a file, and yield their rows."""
    sessions: dict[str, int] = {}
    at = 0
    for record in records:
        if not known.is_played(record):
            continue
        request = replay_request(record, 0.0, default_temperature)
        features = request.features
        known.drafted |= {name: max(k, known.drafted.get(name, 0)) for name, k in request.drafted.items()}
        packed = pickle.dumps((_FEATURES(features), _REST(request)), pickle.HIGHEST_PROTOCOL)
        file.write(packed)
        workloads = known.workloads
        yield (
            math.nan if record.arrived_at is None else record.arrived_at,
            features.temperature,
            features.prompt_tokens,
            math.nan if request.think_s is None else request.think_s,
            request.output_tokens,
            workloads.setdefault(features.workload, len(workloads)),
            sessions.setdefault(request.session, len(sessions)) if request.session else -1,
            at,
            len(packed),
            0,
            *(known.outcome_of(record) if record.backend else NO_OUTCOME),
        )
        at += len(packed)


_AT = (_ROW.names or ()).index("at")
_OUTCOMES = ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "e2e_s", "tokens_per_step")


class _File:
    """The file of the requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: mmap.mmap | None = None

    def read(self, at: int, length: int) -> Any:
        if self._mapped is None:
            with self.path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pickle.loads(self._mapped[at : at + length])  # noqa: S301 -- written above, by this process

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]
