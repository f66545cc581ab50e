"""Conversations: ShareGPT's, and lists of messages as in the chat API. They have no times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lab.trace.decode import estimate_tokens, tokens_beside_text
from lab.trace.formats.format import Format, Reader, Units, why
from lab.trace.lines import BrokenLine, Report, entries
from lab.trace.record import TraceRecord
from policies.features.prompt import read_prompt

_ROLES = {"system": "system", "developer": "system"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant")
_OF_TOOLS = ("tool_calls", "tool_call_id", "name")
_MOST_ALONE = 10_000  # messages of one conversation, all kept in memory


def _of_conversations(turns_of: Callable[[Any], object]) -> Reader:
    """Return a reader of conversations: each answer makes a request whose prompt is everything before it."""

    def read(path: Path, report: Report, _: Units) -> Iterator[TraceRecord]:
        alone: list[Any] = []  # messages that are entries of their own: one conversation
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


class _Turn(NamedTuple):
    """A turn: as a message of the chat API, its text including tool calls' arguments, and all its tokens."""

    message: dict[str, Any]
    text: str
    tokens: int


def _turn(turn: Any) -> _Turn:
    role = turn.get("from", turn.get("role"))
    is_result = role == "tool" and turn.get("tool_call_id")
    message = {"role": role if is_result else _ROLES.get(role, "user")}
    message |= {"content": turn.get("value", turn.get("content"))}
    message |= {name: turn[name] for name in _OF_TOOLS if turn.get(name)}
    prompt = read_prompt({"messages": [message]})
    if not prompt.pieces and not prompt.parts:
        raise ValueError("a turn without text")
    text = "\n".join(prompt.pieces)
    return _Turn(message, text, estimate_tokens(text) + tokens_beside_text(prompt))


def _add(alone: list[Any], turn: Any) -> None:
    """Add a message that is an entry of its own to those before it."""
    _turn(turn)
    if len(alone) == _MOST_ALONE:
        raise ValueError(f"more than {_MOST_ALONE:,} messages on lines of their own")
    alone.append(turn)


def _requests(turns: object, session: str, model: str) -> Iterator[TraceRecord]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError("has no list of turns: 'conversations' or 'messages'")  # noqa: TRY004 -- invalid data
    messages: list[dict[str, Any]] = []
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

    for message, text, count in map(_turn, turns):
        if message["role"] == "assistant" and messages and text:
            answers += 1
            yield request(text)
        messages.append(message)
        tokens.append(count)
    if messages and not answers:
        answers = 1
        yield request(None)


SHAREGPT = Format(_of_conversations(_turns), lambda keys: "conversations" in keys or "conversation" in keys)
MESSAGES = Format(
    _of_conversations(_messages),
    lambda keys: isinstance(keys.get("messages"), list) or {"role", "content"} <= keys.keys(),
)
