"""The template of a request: a digest of the text that requests of one application share."""

from __future__ import annotations

from functools import lru_cache
from typing import Final
from zlib import crc32

SYSTEM_CHARS: Final = 256
"""Characters of a system prompt that count; applications put the date, user or retrieved passages further on."""

HEAD_CHARS: Final = 64
"""Characters of the first line that count if there is no system prompt: usually an instruction, not its subject."""

HEAD_IDS: Final = 32
"""Token ids that count in a prompt of token ids; more than a chat template starts with."""


def of_system_prompt(text: str) -> str:
    """Return eight hex digits for a system prompt; empty if the prompt is.

    Examples
    --------
    >>> of_system_prompt("You are a helpful assistant.")
    'a3989997'
    """
    return _of_head(text[:SYSTEM_CHARS])


def of_prompt(text: str) -> str:
    """Return eight hex digits for the first non-blank line of a prompt."""
    head, _, _ = text[: 4 * HEAD_CHARS].lstrip().partition("\n")
    return _digest(head[:HEAD_CHARS].rstrip())


def of_token_ids(ids: list[int]) -> str:
    """Return eight hex digits for the first token ids of a prompt."""
    return _digest(",".join(map(str, ids[:HEAD_IDS])))


@lru_cache(maxsize=1024)  # an application sends the same text each time; a hit takes a third of the computation
def _of_head(head: str) -> str:
    return _digest(head.strip())


def _digest(text: str) -> str:
    # Unlike hash(), the same in every process and on every machine. A collision only merges two applications.
    return crc32(text.encode("utf-8", "surrogatepass")).to_bytes(4, "big").hex() if text else ""
