"""Traces of aiperf: requests with lengths or text, in sessions whose later turns have a delay instead of a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from lab.trace.decode import decode
from lab.trace.formats.format import Format, Units, why
from lab.trace.lines import BrokenLine, Report, entries
from lab.trace.record import BLOCK_TOKENS, TraceRecord
from lab.trace.values import read_not_negative, read_object, read_text

_TEXTS = ("text_input", "text", "input")
_MOST_SESSIONS = 1_000_000


def _read(path: Path, report: Report, units: Units) -> Iterator[TraceRecord]:
    """Read requests, each alone or in the `turns` of a session.

    A turn is sent its delay after the previous answer ended. If it has no time, the previous turn's time plus the delay
    place it in the order.
    """
    last_at: dict[str, float | None] = {}  # by session
    numbers = count(1)
    for number, entry in entries(path, report):
        try:
            document = read_object(orjson.loads(entry))
            session = read_text(document.get("session_id") or "")
            turns = document.get("turns")
            if turns is not None and not session:
                session = f"{path.name}:{number}"
            for given in [document] if turns is None else map(read_object, turns):
                at, delay = given.get("timestamp"), given.get("delay")
                at_s = None if at is None else read_not_negative(at) / units.per_s
                think_s = None if delay is None or session not in last_at else read_not_negative(delay) / units.per_s
                before_s = last_at.get(session)
                if at_s is None and think_s is not None and before_s is not None:
                    at_s = before_s + think_s
                text = next((given[name] for name in _TEXTS if isinstance(given.get(name), str)), None)
                known = {
                    "arrived_at": at_s,
                    "session": session,
                    "think_time_s": think_s,
                    "model": given.get("model"),
                    "prompt": text,
                    "prompt_tokens": given.get("input_length") if text is None else None,
                    "output_tokens": given.get("output_length"),
                    "hash_ids": given.get("hash_ids"),
                    "block_tokens": units.block_tokens,
                }
                yield decode(known, next(numbers))
                if session and len(last_at) < _MOST_SESSIONS:
                    last_at[session] = at_s
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            report(BrokenLine(path, number, why(error)))


def _has(keys: Mapping[str, Any]) -> bool:
    own = {"session_id", "delay", "text_input", "turns"} & keys.keys()
    return bool(own and keys.keys() & {"input_length", "turns", *_TEXTS}) or keys.keys() == {"text"}


AIPERF = Format(_read, _has, Units("ms", BLOCK_TOKENS))
