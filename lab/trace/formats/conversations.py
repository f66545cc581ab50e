"""Conversations in ShareGPT's format: a JSON list, or one conversation per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from lab.trace.decode import estimate_tokens
from lab.trace.duck import database, rows
from lab.trace.lines import BrokenLine, Report, TraceError, begins_a_list, compression_of, numbered_lines
from lab.trace.record import TraceRecord

_ROLES = {"system": "system"} | dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant")
_MAX_ENTRY_BYTES = 16 * 2**20


def read_sharegpt(path: Path, report: Report) -> Iterator[TraceRecord]:
    """Read each answer of each conversation as a request whose prompt is the conversation before it.

    The requests of a conversation share a session; they have no times.
    """
    for number, entry in _entries(path, report):
        try:
            yield from _requests(orjson.loads(entry), number)
        except (ValueError, AttributeError, TypeError) as error:
            report(BrokenLine(path, number, str(error)))


def _entries(path: Path, report: Report) -> Iterator[tuple[int, bytes | str]]:
    """Yield the JSON of each conversation with its position in the list or its line number, from 1."""
    if not begins_a_list(path):
        yield from numbered_lines(path, report)
        return
    import duckdb

    query = "select json from read_json_objects(?, format = 'array', compression = ?, maximum_object_size = ?)"
    with database() as connection:
        try:
            entries = rows(connection, query, [str(path), compression_of(path), _MAX_ENTRY_BYTES])
            for number, (entry,) in enumerate(entries, 1):
                yield number, entry
        except duckdb.Error as error:
            raise TraceError(f"{path}: {str(error).splitlines()[0]}") from None


def _requests(entry: Any, number: int) -> Iterator[TraceRecord]:
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ValueError("has no list 'conversations': not ShareGPT's format")  # noqa: TRY004 -- invalid data
    session = str(entry.get("id", number))
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    answers = 0
    for turn in turns:
        role = _ROLES.get(turn.get("from", turn.get("role")), "user")
        text = turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            raise ValueError("a turn without text")  # noqa: TRY004 -- invalid data
        size = estimate_tokens(text)
        if role == "assistant" and messages and text:
            answers += 1
            yield TraceRecord(
                id=f"{session}/{answers}",
                session=session,
                turns=sum(message["role"] != "system" for message in messages),
                prompt_tokens=sum(tokens),
                output_tokens=size,
                messages=list(messages),
                output=text,
            )
        messages.append({"role": role, "content": text})
        tokens.append(size)
