"""Which application a request comes from, told by the text that its requests share."""

from __future__ import annotations

from functools import lru_cache
from typing import Final
from zlib import crc32

SYSTEM_CHARS: Final = 256
"""Of a system prompt, what counts: applications put the date, the user or retrieved passages after it."""

HEAD_CHARS: Final = 64
"""Of a prompt without a system prompt, what counts of its first line: the instruction, less often the matter."""

HEAD_IDS: Final = 32
"""Of a prompt of token ids, what counts: past the few ids that a chat template begins with."""


def of_system_prompt(text: str) -> str:
    """Return eight hex digits for a system prompt; empty for an empty one."""
    return _of_head(text[:SYSTEM_CHARS])


def of_prompt(text: str) -> str:
    """Return eight hex digits for the head of a prompt: its first line that is not blank, cut short."""
    head, _, _ = text[: 4 * HEAD_CHARS].lstrip().partition("\n")
    return _digest(head[:HEAD_CHARS].rstrip())


def of_token_ids(ids: list[int]) -> str:
    """Return eight hex digits for the head of a prompt that came as token ids."""
    return _digest(",".join(map(str, ids[:HEAD_IDS])))


@lru_cache(maxsize=1024)  # an application sends the same each time; to look it up takes a third of working it out
def _of_head(head: str) -> str:
    return _digest(head.strip())


def _digest(text: str) -> str:
    # The same in every process and on every machine, unlike hash(); nothing is at stake in a collision.
    return crc32(text.encode("utf-8", "surrogatepass")).to_bytes(4, "big").hex() if text else ""
