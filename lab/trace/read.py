"""Reading traces: which format a file is in, and its records one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from lab.trace.conversations import read_sharegpt
from lab.trace.decode import CountTokens, decode, estimate_tokens
from lab.trace.lines import BrokenLine, BrokenLines, Report, TraceError, damages, numbered_lines, open_unpacked, refuse
from lab.trace.order import in_arrival_order, lateness
from lab.trace.record import BLOCK_TOKENS, TraceRecord
from lab.trace.tables import AZURE, BURSTGPT, columns_of, is_table, read_azure, read_burstgpt
from lab.trace.values import read_time

FORMATS = {
    "gateway": "this gateway's own: JSON lines as in docs/trace.md",
    "azure": "Azure LLM inference traces, 2023 and 2024: CSV",
    "burstgpt": "BurstGPT: CSV",
    "mooncake": "Mooncake: JSON lines with hash_ids",
    "sharegpt": "ShareGPT: a JSON list of conversations, or one a line",
    "vllm": "the custom dataset of `vllm bench serve`: JSON lines with prompt and output_tokens",
}
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv")
_LOOKED_AT = 20  # lines, of which one at least must tell the format: the first may be broken
logger = logging.getLogger(__name__)


def read_trace(
    path: Path | str | Iterable[Path],
    *,
    format: str | None = None,
    strict: bool = False,
    in_order: bool = False,
    report: Report | None = None,
    count_tokens: CountTokens = estimate_tokens,
) -> Iterator[TraceRecord]:
    """Read a trace in any format, in memory that does not grow with it.

    Parameters
    ----------
    path
        A file, a folder of them (what the recorder writes), or several of either, read one after the other; plain or
        packed with gzip or zstd, whatever they are called.
    format
        One of `FORMATS`; None finds out from the content of each file.
    strict
        True refuses a trace with a broken line; False reports and skips it.
    in_order
        True sorts by arrival (`in_arrival_order`), for which the files are read twice; False leaves their order. A
        recorder writes requests as they end, and each worker to files of its own.
    report
        Told of broken lines; None logs the first few as warnings.
    count_tokens
        Counts the tokens of texts whose length the trace does not tell.

    Raises
    ------
    TraceError
        If a file cannot be read or is in no known format; while reading, for the first broken line if `strict`.
    ValueError
        If there is no such format.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"no format is called {format!r}; there are {', '.join(FORMATS)}")
    files = [(file, format or detect_format(file)) for file in trace_files(path)]
    told = refuse if strict else report or BrokenLines(logger.warning)
    records = chain.from_iterable(_read(file, kind, told, count_tokens) for file, kind in files)
    if not in_order:
        return records
    if not all(file.is_file() for file, _ in files):  # a pipe is read once
        return in_arrival_order(records)
    arrivals = chain.from_iterable(_arrivals(file, kind, count_tokens) for file, kind in files)
    return in_arrival_order(records, lateness(arrivals))


def trace_files(path: Path | str | Iterable[Path]) -> list[Path]:
    """Return the files of a trace, those of a folder by name.

    Raises
    ------
    TraceError
        If there are none.
    """
    files: list[Path] = []
    for one in [Path(path)] if isinstance(path, Path | str) else path:
        if one.is_dir():
            found = sorted(file for file in one.iterdir() if file.is_file() and _is_named_as_trace(file))
            if not found:
                raise TraceError(f"{one}: holds no trace: no file that ends in {', '.join(_SUFFIXES)}, .gz or .zst")
            files += found
        else:
            files.append(one)
    return files


def _is_named_as_trace(file: Path) -> bool:
    return file.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(_SUFFIXES)


def detect_format(path: Path) -> str:
    """Tell from its content which of `FORMATS` a file is in.

    Raises
    ------
    TraceError
        If it is in none, or cannot be read.
    """
    with suppress(*damages()), open_unpacked(path) as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            return "sharegpt"
    damage = BrokenLines(lambda _: None)
    lines = list(islice(numbered_lines(path, damage), _LOOKED_AT))
    if not lines:
        return "gateway"  # empty, or cut off before its first line was whole: a recorder's whose process was killed
    for _, line in lines:
        columns = columns_of(line[:4096])
        if is_table(columns, AZURE):
            return "azure"
        if is_table(columns, BURSTGPT):
            return "burstgpt"
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict) and (found := _format_of(document)):
            return found
    raise TraceError(f"{path}: in no format that is known here ({', '.join(FORMATS)}); force one with --format")


def _format_of(document: dict[str, Any]) -> str | None:
    if "input_length" in document and "output_length" in document:
        return "mooncake"
    if "conversations" in document or "conversation" in document:
        return "sharegpt"
    own = {"arrived_at", "prompt_tokens", "version", "acceptance", "messages", "prompt_token_ids"}
    if own & document.keys():
        return "gateway"
    return "vllm" if "prompt" in document else None


def _read(path: Path, kind: str, report: Report, count_tokens: CountTokens) -> Iterator[TraceRecord]:
    if kind == "azure":
        return read_azure(path, report)
    if kind == "burstgpt":
        return read_burstgpt(path, report)
    if kind == "sharegpt":
        return read_sharegpt(path, report, count_tokens)
    return _read_lines(path, kind, report, count_tokens)


def _read_lines(path: Path, kind: str, report: Report, count_tokens: CountTokens) -> Iterator[TraceRecord]:
    """Read JSON lines; what `vllm bench serve` takes has a record's names for all that it has."""
    for number, line in numbered_lines(path, report):
        try:
            document = orjson.loads(line)
            record = _mooncake(document, number) if kind == "mooncake" else decode(document, number, count_tokens)
        except (ValueError, KeyError, TypeError) as error:
            report(BrokenLine(path, number, _why(error)))
            continue
        yield record


def _arrivals(path: Path, kind: str, count_tokens: CountTokens) -> Iterator[float]:
    """Yield when each request came, at a fraction of the cost of its record; of some broken lines, too."""
    ignored = BrokenLines(lambda _: None)
    if kind not in {"gateway", "mooncake"}:
        yield from (
            -math.inf if one.arrived_at is None else one.arrived_at for one in _read(path, kind, ignored, count_tokens)
        )
        return
    key = "timestamp" if kind == "mooncake" else "arrived_at"
    for _, line in numbered_lines(path, ignored):
        try:
            arrived_at = orjson.loads(line).get(key)
            yield -math.inf if arrived_at is None else read_time(arrived_at)
        except (ValueError, AttributeError):
            continue


def _why(error: Exception) -> str:
    if isinstance(error, orjson.JSONDecodeError):
        return f"not JSON: {error}"
    return f"has no {error}" if isinstance(error, KeyError) else str(error)


def _mooncake(document: Any, number: int) -> TraceRecord:
    own = {
        "arrived_at": document["timestamp"] / 1000.0,
        "prompt_tokens": document["input_length"],
        "output_tokens": document["output_length"],
        "hash_ids": document.get("hash_ids"),
        "block_tokens": BLOCK_TOKENS,
    }
    return decode({**document, **own}, number)
