"""The demo's requests: questions at temperature 0.7, and code edits at 0."""

from __future__ import annotations

import ast
import functools
import sysconfig
import textwrap
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random

import yaml

MODEL = "llama-3.1-8b"
_TEXTS = yaml.safe_load(files("lab.demo").joinpath("requests.yaml").read_text("utf-8"))
_CODE_LINES = range(8, 31)


@dataclass(frozen=True, slots=True)
class DemoKind:
    """A kind of request."""

    workload: str  # what clients declare with `x-gateway-workload`
    system: str
    temperature: float

    def messages(self, random: Random) -> list[dict[str, str]]:
        """Return the messages of a random request of this kind."""
        asked = _edit(random) if self is EDITS else _question(random)
        return [{"role": "system", "content": self.system}, {"role": "user", "content": asked}]


CHAT = DemoKind("chat", _TEXTS["assistant"], 0.7)
EDITS = DemoKind("edit", _TEXTS["editor"], 0.0)


def _question(random: Random) -> str:
    about = f"{random.choice(_TEXTS['aspects'])} {random.choice(_TEXTS['topics'])}"
    question: str = random.choice(_TEXTS["questions"])
    return question.format(about)


def _edit(random: Random) -> str:
    return f"{random.choice(_TEXTS['changes'])}\n```python\n{random.choice(_functions())}\n```"


@functools.cache
def _functions() -> list[str]:
    """Return the source of functions and methods in the standard library."""
    library, found = Path(sysconfig.get_path("stdlib")), []
    for module in _TEXTS["modules"]:
        source = (library / f"{module}.py").read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if len(lines) in _CODE_LINES:
                    found.append(textwrap.dedent("\n".join(lines)))
    return found
