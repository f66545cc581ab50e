"""Traces of requests with block hashes, one JSON object per line: Mooncake's and Qwen-Bailian's."""

from __future__ import annotations

from itertools import accumulate, islice
from typing import Any

from lab.trace.formats.format import Convert, Format, Units, of_entries
from lab.trace.record import BLOCK_TOKENS
from lab.trace.values import read_count, read_number

_MOST_CHATS = 1_000_000  # with a remembered conversation: about 100 MB
_FACTOR, _MODULUS = 6364136223846793005, 2**61 - 1  # a polynomial of the blocks, below 2^63
_WORKLOADS = {"coder": "code", "thinking": "reasoning", "text": "chat"}


def of_mooncake(units: Units) -> Convert:
    """Return a function that converts a request of a Mooncake trace to a record's keys.

    Examples
    --------
    >>> document = {"timestamp": 500, "input_length": 9, "output_length": 2, "hash_ids": [4]}
    >>> [of_mooncake(Units(unit, 512))(document)["arrived_at"] for unit in ("ms", "s")]
    [0.5, 500.0]
    """
    return lambda document: {
        **document,
        "arrived_at": read_number(document["timestamp"]) / units.per_s,
        "prompt_tokens": document["input_length"],
        "output_tokens": document["output_length"],
        "hash_ids": document.get("hash_ids"),
        "block_tokens": units.block_tokens,
    }


class BailianRequests:
    """Converts requests of a Qwen-Bailian trace, and finds each one's conversation: the first chat of its chain.

    A chat whose parent is not in the trace, or more than a million chats earlier, starts a conversation.

    Examples
    --------
    >>> requests = BailianRequests(Units("s", 16))
    >>> first = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 20, "output_length": 5, "turn": 1}
    >>> requests(first)["session"], requests(first | {"chat_id": 7, "parent_chat_id": 1, "turn": 2})["session"]
    ('1', '1')
    """

    def __init__(self, units: Units) -> None:
        self._first: dict[int, int] = {}
        self._units = units

    def __call__(self, document: dict[str, Any]) -> dict[str, Any]:
        """Convert a request to a record's keys."""
        chat, parent = read_count(document["chat_id"]), document.get("parent_chat_id")
        first = self._first[chat] = self._first.get(parent, chat) if isinstance(parent, int) else chat
        if len(self._first) > _MOST_CHATS:
            del self._first[next(iter(self._first))]
        kind, turn = document.get("type"), document.get("turn")
        return {
            "id": str(chat),
            "arrived_at": read_number(document["timestamp"]) / self._units.per_s,
            "session": str(first),
            "workload": _WORKLOADS.get(kind, kind) if isinstance(kind, str) else "",
            "prompt_tokens": document["input_length"],
            "output_tokens": document["output_length"],
            "turns": None
            if turn is None
            else max(1, 2 * read_count(turn) - 1),  # messages: a question and an answer each
            "prefix_blocks": _with_all_before(document.get("hash_ids")),
            "block_tokens": self._units.block_tokens,
        }


def _with_all_before(blocks: Any) -> Any:
    """Return numbers that identify each block and all before it; the trace's identify only the block."""
    if not isinstance(blocks, list) or set(map(type, blocks)) - {int}:
        return blocks  # invalid: `decode` reports it
    return list(islice(accumulate(blocks, _next, initial=0), 1, None))


def _next(before: int, block: int) -> int:
    return (before * _FACTOR + block + 1) % _MODULUS


_LENGTHS = {"timestamp", "input_length", "output_length"}
MOONCAKE = Format(
    of_entries(of_mooncake),
    lambda keys: keys.keys() >= _LENGTHS and not keys.keys() & {"chat_id", "session_id", "delay"},
    Units("ms", BLOCK_TOKENS),
)
BAILIAN = Format(of_entries(BailianRequests), lambda keys: keys.keys() >= _LENGTHS | {"chat_id"}, Units("s", 16))
