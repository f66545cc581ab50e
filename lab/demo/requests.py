"""The requests of the demo: questions at temperature 0.7, and edits of code at 0."""

from __future__ import annotations

import bisect
import calendar
import heapq
import inspect
import shlex
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

MODEL = "llama-3.1-8b"
_MAX_TOKENS = 180
_MODULES = (bisect, calendar, heapq, shlex, statistics, textwrap)
_CODE_LINES = range(8, 40)
_ASSISTANT = "You are a friendly assistant. Answer in plain words."
_EDITOR = "You are a code editor. Return the whole function, changed as asked, and nothing else."
_CHANGES = (
    "Rename the variables of this function so that a beginner understands them.",
    "Add type hints to this function.",
    "Add a docstring to this function.",
    "Fix the formatting of this function.",
    "Update this function: it should raise ValueError for wrong arguments.",
)
_QUESTIONS = (
    "Why do people enjoy {}?",
    "Tell me something surprising about {}.",
    "What should I know about {} before I travel?",
    "Explain {} to a child of ten.",
    "How has {} changed in the last hundred years?",
)
_TOPICS = (
    *("old maps", "the night sky", "bread", "chess", "jazz", "tea", "mountain railways", "lighthouses", "beekeeping"),
    *("sourdough", "the tides", "bicycles", "public libraries", "earthquakes", "paper", "coral reefs", "trams", "salt"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Parameters
    ----------
    workload
        What clients declare with `x-gateway-workload`.
    """

    workload: str
    system: str
    temperature: float

    def body(self, random: Random) -> bytes:
        """Return the body of a request of this kind, drawn at random."""
        return orjson.dumps(
            {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": self.system},
                    {"role": "user", "content": _edit(random) if self is EDITS else _question(random)},
                ],
                "temperature": self.temperature,
                "max_tokens": _MAX_TOKENS,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


CHAT = Kind("chat", _ASSISTANT, 0.7)
EDITS = Kind("edit", _EDITOR, 0.0)


def _question(random: Random) -> str:
    return random.choice(_QUESTIONS).format(random.choice(_TOPICS))


def _edit(random: Random) -> str:
    return f"{random.choice(_CHANGES)}\n```python\n{random.choice(_SOURCES)}```"


def _functions() -> Sequence[str]:
    """Return functions of the standard library as text: real code that every machine has."""
    found: list[str] = []
    for module in _MODULES:
        members: list[tuple[str, Any]] = inspect.getmembers(module, inspect.isfunction)
        sources = (inspect.getsource(member) for _, member in members if member.__module__ == module.__name__)
        found += (source for source in sources if source.count("\n") in _CODE_LINES)
    return found


_SOURCES = _functions()
