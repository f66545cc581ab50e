"""The requests of the demo: questions at temperature 0.7, and edits of code at 0."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

MODEL = "llama-3.1-8b"
_MODULES = """
argparse calendar cmd configparser csv dataclasses difflib doctest fractions ftplib gettext imaplib inspect ipaddress
mailbox optparse pdb pickle plistlib poplib pprint shlex shutil smtplib statistics subprocess tarfile tempfile textwrap
traceback zipfile
"""
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
    "Who were the first to think about {}?",
    "What do beginners get wrong about {}?",
    "Describe a quiet afternoon with {}.",
)
_ASPECTS = """
the history of, the science of, the sound of, the price of, the people behind, the future of, the dangers of,
the pleasure of, the words for, the smell of, the rules of, the art of, the tools of, the myths around,
the places known for, the craft of, the arithmetic of, the colours of, the seasons of
"""
_TOPICS = """
old maps, the night sky, bread, chess, jazz, tea, mountain railways, lighthouses, beekeeping, sourdough, the tides,
bicycles, public libraries, earthquakes, paper, coral reefs, trams, salt, bridges, clocks, wool, canals, orchards,
kites, pottery, glaciers, harbours, violins, moss, windmills, ink, rope, ferries, cheese, fountains, owls, caves,
printing, gardens, stamps
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    workload: str  # what clients declare with `x-gateway-workload`
    system: str
    temperature: float

    def messages(self, random: Random) -> list[dict[str, str]]:
        """Return the messages of a request of this kind, drawn at random."""
        asked = _edit(random) if self is EDITS else _question(random)
        return [{"role": "system", "content": self.system}, {"role": "user", "content": asked}]


CHAT = Kind("chat", _ASSISTANT, 0.7)
EDITS = Kind("edit", _EDITOR, 0.0)


def _question(random: Random) -> str:
    """Return one of six thousand questions: no real chat consists of the same few."""
    about = " ".join(random.choice(listed.split(",")).strip() for listed in (_ASPECTS, _TOPICS))
    return random.choice(_QUESTIONS).format(about)


def _edit(random: Random) -> str:
    return f"{random.choice(_CHANGES)}\n```python\n{random.choice(_SOURCES)}\n```"


def _functions() -> Iterator[str]:
    """Yield functions and methods of the standard library as text: real code that every machine has."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES.split():
        source = (library / f"{module}.py").read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if len(lines) in _CODE_LINES:
                    yield textwrap.dedent("\n".join(lines))


_SOURCES = tuple(_functions())
