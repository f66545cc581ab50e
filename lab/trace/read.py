"""Reading traces: format detection, and a stream of records."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from lab.trace.decode import decode
from lab.trace.formats.block_hashes import BailianRequests, of_mooncake
from lab.trace.formats.conversations import read_sharegpt
from lab.trace.formats.tables import TABLES, columns_of, read_table
from lab.trace.formats.weka import is_weka, read_weka
from lab.trace.lines import BrokenLine, BrokenLines, Report, TraceError, begins_a_list, numbered_lines, refuse
from lab.trace.order import in_arrival_order
from lab.trace.record import TraceRecord

FORMATS = {
    "gateway": "this gateway's format: JSON lines as in docs/replay.md",
    "azure": "Azure LLM inference traces, 2023 and 2024: CSV",
    "burstgpt": "BurstGPT, versions 1 and 2: CSV",
    "mooncake": "Mooncake: JSON lines with hash_ids",
    "bailian": "Qwen-Bailian usage traces: JSON lines with chat_id and hash_ids",
    "weka": "kv-cache-tester's sessions of coding agents: a JSON object with requests, or one per line",
    "sharegpt": "ShareGPT: a JSON list of conversations, or one per line",
    "vllm": "the custom dataset of `vllm bench serve`: JSON lines with prompt and output_tokens",
}
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv")
_DETECTION_LINES = 20  # lines searched for one that identifies the format; the first may be broken
logger = logging.getLogger(__name__)


def read_trace(
    path: Path | str | Iterable[Path],
    *,
    format: str | None = None,
    strict: bool = False,
    in_order: bool = False,
    report: Report | None = None,
    outcomes: bool = True,
) -> Iterator[TraceRecord]:
    """Read a trace in any format, in memory that does not grow with its size."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; the formats are {', '.join(FORMATS)}")
    files = [(file, format or detect_format(file)) for file in trace_files(path)]
    on_broken_line = refuse if strict else report or BrokenLines(logger.warning)
    records = chain.from_iterable(_read(file, kind, on_broken_line, outcomes=outcomes) for file, kind in files)
    return in_arrival_order(records) if in_order else records


def trace_files(path: Path | str | Iterable[Path]) -> list[Path]:
    """Return the files of a trace, those of a folder sorted by name."""
    files: list[Path] = []
    for entry in [Path(path)] if isinstance(path, Path | str) else path:
        if entry.is_dir():
            in_folder = sorted(file for file in entry.iterdir() if file.is_file() and _is_trace(file))
            if not in_folder:
                raise TraceError(f"{entry}: holds no trace: no file that ends in {', '.join(_SUFFIXES)}, .gz or .zst")
            files += in_folder
        else:
            files.append(entry)
    return files


def _is_trace(file: Path) -> bool:
    return file.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(_SUFFIXES)


def detect_format(path: Path) -> str:
    """Return which of `FORMATS` a file is in, detected from its content."""
    if begins_a_list(path):
        return "sharegpt"
    if is_weka(path):
        return "weka"
    lines = list(islice(numbered_lines(path, BrokenLines(lambda _: None)), _DETECTION_LINES))
    if not lines:
        return "gateway"  # empty, or truncated within the first line because the recorder was killed
    for _, line in lines:
        columns = set(columns_of(line[:4096]))
        for kind, needed in TABLES.items():
            if columns.issuperset(needed):
                return kind
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(document, dict) and (format := _format_of(document)):
            return format
    raise TraceError(f"{path}: unknown format; give one of {', '.join(FORMATS)} with --format")


def _format_of(document: dict[str, Any]) -> str | None:
    if "input_length" in document and "output_length" in document:
        return "bailian" if "chat_id" in document else "mooncake"
    if "conversations" in document or "conversation" in document:
        return "sharegpt"
    own = {"arrived_at", "prompt_tokens", "version", "acceptance", "messages", "prompt_token_ids"}
    if own & document.keys():
        return "gateway"
    return "vllm" if "prompt" in document else None


_READERS = {"sharegpt": read_sharegpt, "weka": read_weka}


def _read(path: Path, kind: str, report: Report, *, outcomes: bool) -> Iterator[TraceRecord]:
    """Read a file; the keys of `vllm bench serve` datasets are also keys of a record."""
    if kind in TABLES:
        yield from read_table(path, kind, report)
        return
    if reader := _READERS.get(kind):
        yield from reader(path, report)
        return
    convert = {"mooncake": of_mooncake, "bailian": BailianRequests().of}.get(kind)
    for number, line in numbered_lines(path, report):
        try:
            document = orjson.loads(line)
            if convert is not None:
                document = convert(document)
            record = decode(document, number, outcomes=outcomes)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            report(BrokenLine(path, number, _why(error)))
            continue
        yield record


def _why(error: Exception) -> str:
    if isinstance(error, orjson.JSONDecodeError):
        return f"not JSON: {error}"
    return f"has no {error}" if isinstance(error, KeyError) else str(error)
