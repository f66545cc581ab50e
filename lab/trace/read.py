"""Reads traces: format detection, and a stream of records."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from lab.trace.decode import decode, encode
from lab.trace.duck import database, insert, rows
from lab.trace.formats.aiperf import AIPERF
from lab.trace.formats.block_hashes import BAILIAN, MOONCAKE
from lab.trace.formats.conversations import MESSAGES, SHAREGPT
from lab.trace.formats.format import Format, Units, why
from lab.trace.formats.litellm import LITELLM
from lab.trace.formats.openai_batch import OPENAI_BATCH
from lab.trace.formats.plausible import units_of
from lab.trace.formats.tables import AZURE, BURSTGPT, columns_of
from lab.trace.formats.weka import WEKA, is_weka
from lab.trace.lines import BrokenLine, BrokenLines, Report, TraceError, entries, refuse
from lab.trace.record import TraceRecord

MAX_IN_MEMORY = 50_000
"""Number of records from which sorting moves from memory to disk (DuckDB)."""

_BATCH = 8192


_OWN = frozenset({"arrived_at", "prompt_tokens", "acceptance", "prompt_token_ids", "prompt_hashes", "output_hashes"})
_FIELDS = {*TraceRecord.__slots__, "version", "hash_ids"}
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv")
_DETECTION_LINES = 20  # lines searched for one that identifies the format; the first may be broken
logger = logging.getLogger(__name__)


def in_arrival_order(records: Iterable[TraceRecord], held: int = MAX_IN_MEMORY) -> Iterator[TraceRecord]:
    """Sort records by `arrived_at`; the sort is stable, and records without a time come first.

    Examples
    --------
    >>> records = [TraceRecord(id="a", arrived_at=2.0), TraceRecord(id="b", arrived_at=1.0)]
    >>> [record.id for record in in_arrival_order(records)]
    ['b', 'a']
    """
    iterator = iter(records)
    batch = list(islice(iterator, held))
    if len(batch) < held:
        yield from sorted(batch, key=_time)
        return
    with database() as connection:
        connection.execute("create table records (arrived_at double, index bigint, line blob)")
        index = 0
        while batch:
            lines = np.empty(len(batch), object)
            lines[:] = [encode(record) for record in batch]
            times = np.fromiter(map(_time, batch), np.float64, len(batch))
            insert(connection, "records", {"at": times, "index": np.arange(index, index + len(batch)), "line": lines})
            index += len(batch)
            batch = list(islice(iterator, _BATCH))
        for number, (line,) in enumerate(rows(connection, "select line from records order by arrived_at, index"), 1):
            yield decode(orjson.loads(line), number)


def _time(record: TraceRecord) -> float:
    return -math.inf if record.arrived_at is None else record.arrived_at


def _is_record(keys: Mapping[str, Any]) -> bool:
    known = keys.keys() & _FIELDS
    return "version" in keys or bool(keys.keys() & _OWN and 2 * len(known) > len(keys))


def _read_records(path: Path, report: Report, _: Units) -> Iterator[TraceRecord]:
    """Read records; the keys of `vllm bench serve` datasets are also keys of a record."""
    for number, entry in entries(path, report):
        try:
            record = decode(orjson.loads(entry), number)
        except (ValueError, TypeError) as error:
            report(BrokenLine(path, number, why(error)))
            continue
        yield record


# In order of recognition.
FORMATS: dict[str, Format] = {
    "gateway": Format(_read_records, _is_record),
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "mooncake": MOONCAKE,
    "aiperf": AIPERF,
    "bailian": BAILIAN,
    "weka": WEKA,
    "sharegpt": SHAREGPT,
    "litellm": LITELLM,
    "openai_batch": OPENAI_BATCH,
    "messages": MESSAGES,
    "vllm": Format(_read_records, lambda keys: "prompt" in keys),
}


def read_trace(
    path: Path | str | Iterable[Path],
    *,
    format: str | None = None,
    strict: bool = False,
    in_order: bool = False,
    report: Report | None = None,
    units: Units = Units(),  # noqa: B008 -- immutable
) -> Iterator[TraceRecord]:
    """Read a trace in any format, in memory independent of its size; raise if all its lines are broken."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; the formats are {', '.join(FORMATS)}")
    kinds = [(file, format or detect_format(file)) for file in trace_files(path)]
    files = [(file, kind, units_of(file, kind, FORMATS[kind].usual, units)) for file, kind in kinds]
    records = _not_none(files, refuse if strict else report or BrokenLines(logger.warning))
    return in_arrival_order(records) if in_order else records


def _not_none(files: list[tuple[Path, str, Units]], report: Report) -> Iterator[TraceRecord]:
    """Yield the records of files; raise at the end if all their lines were broken."""
    first: list[BrokenLine] = []
    is_empty = True

    def noted(broken: BrokenLine) -> None:
        if not first and not broken.is_cut:
            first.append(broken)
        report(broken)

    for file, kind, units in files:
        for record in FORMATS[kind].read(file, noted, units):
            is_empty = False
            yield record
    if first and is_empty:
        kinds = ", ".join(dict.fromkeys(kind for _, kind, _ in files))
        raise TraceError(
            f"no line could be read as {kinds}: {first[0]}. If the format is another, name it with --format"
        )


def trace_files(path: Path | str | Iterable[Path]) -> list[Path]:
    """Return the files of a trace; those in a folder sorted by name."""
    files: list[Path] = []
    for entry in [Path(path)] if isinstance(path, Path | str) else path:
        if entry.is_dir():
            in_folder = sorted(file for file in entry.iterdir() if file.is_file() and _is_trace(file))
            if not in_folder:
                raise TraceError(f"{entry}: holds no trace: no file that ends in {', '.join(_SUFFIXES)}, .gz or .zst")
            files += in_folder
        elif entry.exists() and not entry.is_file():
            raise TraceError(f"{entry}: is a pipe or a device, but a trace is read more than once: give a file")
        else:
            files.append(entry)
    return files


def _is_trace(file: Path) -> bool:
    return file.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(_SUFFIXES)


def detect_format(path: Path) -> str:
    """Detect from a file's content which of `FORMATS` it is in."""
    if is_weka(path):
        return "weka"
    first = list(islice(entries(path, BrokenLines(lambda _: None)), _DETECTION_LINES))
    if not first:
        return "gateway"  # empty, or truncated within the first line because the recorder was killed
    for _, entry in first:
        columns = dict.fromkeys(columns_of(entry[:4096])) if isinstance(entry, bytes) else {}
        for kind in ("azure", "burstgpt"):
            if FORMATS[kind].has(columns):
                return kind
        try:
            document = orjson.loads(entry)
        except orjson.JSONDecodeError:
            continue
        found = _format_of(document)
        if found is not None:
            return found
    raise TraceError(f"{path}: unknown format; give one of {', '.join(FORMATS)} with --format")


def _format_of(document: object) -> str | None:
    """Return the format of an entry; None if its keys match none."""
    if isinstance(document, list):  # of messages
        document = {"messages": document}
    if not isinstance(document, dict):
        return None
    return next((kind for kind, one in FORMATS.items() if one.has(document)), None)
