"""The requests of the demo: questions at temperature 0.7, and edits of code at 0."""

from __future__ import annotations

import argparse
import ast
import calendar
import csv
import difflib
import inspect
import json.encoder
import shlex
import statistics
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import orjson

MODEL = "llama-3.1-8b"
_MAX_TOKENS = 180
_MODULES = (argparse, calendar, csv, difflib, json.encoder, shlex, statistics, tarfile, textwrap, zipfile)
_CODE_LINES = range(8, 31)
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
    return f"{random.choice(_CHANGES)}\n```python\n{random.choice(_SOURCES)}\n```"


def _functions() -> Iterator[str]:
    """Yield functions and methods of the standard library as text: real code that every machine has."""
    for module in _MODULES:
        for node in ast.walk(ast.parse(source := inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if len(lines) in _CODE_LINES:
                    yield textwrap.dedent("\n".join(lines))


_SOURCES = tuple(_functions())
