"""Conversations: ShareGPT's, and lists of messages as the chat API takes them. They have no times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from lab.trace.decode import estimate_tokens
from lab.trace.formats.format import Format, Reader, Units, why
from lab.trace.lines import BrokenLine, Report, entries
from lab.trace.record import TraceRecord
from lab.trace.values import text_of

_ROLES = {"system": "system", "developer": "system"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_MOST_ALONE = 10_000  # messages of one conversation, all of which are held


def _of_conversations(turns_of: Callable[[Any], object]) -> Reader:
    """Return the reader of conversations: each answer is a request whose prompt is all that is before it."""

    def read(path: Path, report: Report, _: Units) -> Iterator[TraceRecord]:
        alone: list[Any] = []  # messages that are entries themselves: one conversation
        for number, entry in entries(path, report):
            try:
                found = orjson.loads(entry)
                if isinstance(found, dict) and "role" in found:
                    _add(alone, found)
                    continue
                yield from _requests(turns_of(found), _text(found, "id", number), _text(found, "model"))
            except (ValueError, AttributeError, TypeError) as error:
                report(BrokenLine(path, number, why(error)))
        if alone:
            yield from _requests(alone, "1", "")

    return read


def _text(entry: Any, key: str, default: object = "") -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    return str(default if value is None else value)


def _turns(entry: Any) -> object:
    return entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None


def _messages(entry: Any) -> object:
    return entry.get("messages") if isinstance(entry, dict) else entry


def _turn(turn: Any) -> tuple[str, str]:
    """Return the role and the text of a turn."""
    text = text_of(turn.get("value", turn.get("content")))
    if text is None:
        raise ValueError("a turn without text")
    return _ROLES.get(turn.get("from", turn.get("role")), "user"), text


def _add(alone: list[Any], turn: Any) -> None:
    """Add a message that stands alone to those before it."""
    _turn(turn)
    if len(alone) == _MOST_ALONE:
        raise ValueError(f"more than {_MOST_ALONE:,} messages on lines of their own")
    alone.append(turn)


def _requests(turns: object, session: str, model: str) -> Iterator[TraceRecord]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError("has no list of turns: 'conversations' or 'messages'")  # noqa: TRY004 -- invalid data
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    answers = 0

    def request(output: str | None) -> TraceRecord:
        return TraceRecord(
            id=f"{session}/{answers}",
            session=session,
            model=model,
            turns=sum(message["role"] != "system" for message in messages),
            prompt_tokens=sum(tokens),
            output_tokens=None if output is None else estimate_tokens(output),
            messages=list(messages),
            output=output or "",
        )

    for role, text in map(_turn, turns):
        if role == "assistant" and messages and text:
            answers += 1
            yield request(text)
        messages.append({"role": role, "content": text})
        tokens.append(estimate_tokens(text))
    if messages and not answers:
        answers = 1
        yield request(None)


SHAREGPT = Format(_of_conversations(_turns), lambda keys: "conversations" in keys or "conversation" in keys)
MESSAGES = Format(
    _of_conversations(_messages),
    lambda keys: isinstance(keys.get("messages"), list) or {"role", "content"} <= keys.keys(),
)
