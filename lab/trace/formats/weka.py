"""Sessions of coding agents as published by kv-cache-tester: a JSON object per session."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from lab.trace.formats.format import Format, Units
from lab.trace.lines import MAX_LINE_BYTES, BrokenLine, Report, numbered_lines, open_unpacked, read_errors
from lab.trace.record import TraceRecord
from lab.trace.values import read_count, read_not_negative, read_number, read_object, read_text

_HEAD_BYTES = 1 << 16
_KEYS = (
    re.compile(rb'(?<!\\)"requests"\s*:\s*\['),
    re.compile(rb'(?<!\\)"(block_size|hash_id_scope|tool_tokens)"\s*:'),
)
_BLOCK_TOKENS = 64
_LOCAL_BITS = 28  # of a block's number within its session; the session's own 32 bits are above
_DEEPEST = 8  # sub-agents within sub-agents


def is_weka(path: Path) -> bool:
    """Return whether a file starts with a session, on one line or indented."""
    try:
        with open_unpacked(path) as file:
            head = file.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    except read_errors():
        return False
    return head.startswith(b"{") and all(key.search(head) for key in _KEYS)


def _read(path: Path, report: Report, _: Units) -> Iterator[TraceRecord]:
    """Read the requests of sessions, sub-agents' where they were started: one session per file or per line.

    Every session starts at time 0. The first request of a session or sub-agent has no think time, nor does one sent
    before the last answer ended. Time spent waiting for a sub-agent is part of a request's think time.
    """
    for number, session in _sessions(path, report):

        def say(why: str, number: int = number) -> None:
            report(BrokenLine(path, number, why))

        try:
            requests = _Session(session, f"{path.name}:{number}", say)
        except ValueError as error:
            say(str(error))
        else:
            yield from requests


def _sessions(path: Path, report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each session with the number of its line."""
    lines = numbered_lines(path, report)
    first = next(lines, None)
    if first is None:
        return
    number, line = first
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:  # one session on several lines
        parts, size = [line], len(line)
        for _, part in lines:
            size += len(part)
            if size > MAX_LINE_BYTES:
                report(BrokenLine(path, number, f"a session longer than {MAX_LINE_BYTES >> 20} MiB"))
                return
            parts.append(part)
        lines = iter(((number, b"".join(parts)),))
    else:
        lines = chain(((number, line),), lines)
    for number, line in lines:
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            report(BrokenLine(path, number, f"not JSON: {error}"))
            continue
        if isinstance(document, dict) and isinstance(document.get("requests"), list):
            yield number, document
        else:
            report(BrokenLine(path, number, "a session must be an object with a list 'requests'"))


class _Session:
    """The requests of one session in the order of the file, those of sub-agents where they were started."""

    def __init__(self, document: dict[str, Any], name: str, report: Callable[[str], None]) -> None:
        self._report = report
        self._requests = document["requests"]
        self._name = read_text(document.get("id") or name)
        self._block_tokens = max(1, read_count(document.get("block_size") or _BLOCK_TOKENS))
        self._tools = True if document.get("tool_tokens") else None
        own = int.from_bytes(blake2b(self._name.encode(), digest_size=4).digest())
        self._blocks_from = 0 if document.get("hash_id_scope") == "global" else own << _LOCAL_BITS

    def __iter__(self) -> Iterator[TraceRecord]:
        return self._of(self._requests, self._name, 0.0, _DEEPEST)

    def _of(self, entries: list[Any], name: str, begun_s: float, deepest: int) -> Iterator[TraceRecord]:
        last: TraceRecord | None = None
        waited = False  # whether for a sub-agent
        for number, entry in enumerate(entries, 1):
            try:
                if not _is_subagent(entry, deepest):
                    record = self._record(entry, f"{name}/{number}", name, begun_s)
                    if last is not None:
                        record = replace(record, think_time_s=_think_s(entry, record, last if waited else None))
                    yield record
                    last, waited = record, False
                    continue
                begin_s = _begin(entry, begun_s)
            except (ValueError, KeyError, TypeError, ArithmeticError) as error:
                why = f"has no {error}" if isinstance(error, KeyError) else str(error)
                self._report(f"request {number} of {name}: {why}")
                continue
            waited = True
            agent = entry.get("agent_id") or number
            yield from self._of(entry["requests"], f"{name}/{agent}", begin_s, deepest - 1)

    def _record(self, entry: dict[str, Any], name: str, session: str, begun_s: float) -> TraceRecord:
        blocks = entry.get("hash_ids") or ()
        if not isinstance(blocks, list | tuple) or not all(type(block) is int and block >= 0 for block in blocks):
            raise ValueError("hash_ids: expected a list of whole numbers")
        if self._blocks_from and blocks and max(blocks) >> _LOCAL_BITS:
            raise ValueError(f"hash_ids: numbers within one session must be below 2^{_LOCAL_BITS}")
        ttft_s, e2e_s = (entry.get(key) for key in ("ttft", "api_time"))
        return TraceRecord(
            id=name,
            arrived_at=begun_s + read_number(entry["t"]),
            model=read_text(entry.get("model") or ""),
            session=session,
            workload="code",
            stream=entry.get("type") == "s",
            tools=self._tools,
            prompt_tokens=read_count(entry["in"]),
            output_tokens=read_count(entry["out"]),
            ttft_s=None if ttft_s is None else read_not_negative(ttft_s),
            e2e_s=None if e2e_s is None else read_not_negative(e2e_s),
            prefix_blocks=[self._blocks_from + block for block in blocks],
            block_tokens=self._block_tokens,
        )


def _think_s(entry: dict[str, Any], record: TraceRecord, last: TraceRecord | None) -> float | None:
    """Return the think time of a request; None if it was sent before the last answer ended.

    The trace counts it from the end of sub-agents; after them (`last` is given) it is computed from the times instead.
    """
    think_s = entry.get("think_time")
    if last is not None and last.ended_at is not None and record.arrived_at is not None:
        think_s = record.arrived_at - last.ended_at
    return None if think_s is None or read_number(think_s) < 0 else float(think_s)


def _is_subagent(entry: Any, deepest: int) -> bool:
    if read_object(entry).get("type") != "subagent":
        return False
    if not isinstance(entry.get("requests"), list) or not deepest:
        raise ValueError(f"a sub-agent needs a list 'requests', and at most {_DEEPEST} others around it")
    return True


def _begin(marker: dict[str, Any], begun_s: float) -> float:
    """Return the origin of the times of a sub-agent's requests.

    kv-cache-tester counts from the marker, others from the start of the session: if the first request is earlier than
    its marker, times count from the marker.
    """
    at_s = read_number(marker.get("t", 0.0))
    first = next((one.get("t") for one in marker["requests"] if isinstance(one, dict)), None)
    return begun_s + at_s if first is not None and read_number(first) < at_s else begun_s


WEKA = Format(_read)
