"""Blocks of code in the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.paths import DOCS, ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "deploy").rglob("*.md")),
    *sorted(DOCS.glob("*.md")),
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:gateway [a-z-]+ ?|python -m|scripts/[\w-]+|\.venv/bin/\w+|benchmarks/\w+/run)[^`\n]*)`")
_HEREDOC = re.compile(r"<<\s*'?(\w+)'?")
_SEPARATORS = {"|", "||", "&&", ";", "&", ";;", "(", ")"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(slots=True)
class Step:
    """A command line, which may be several commands, and the output that the page shows for it."""

    block: Block
    text: str
    shown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.block} {self.text.partition(chr(10))[0]}"

    @property
    def is_prelude(self) -> bool:
        """Whether later command lines of the page need this one: it sets variables, or defines a function."""
        return bool(re.match(r"export |\w+\(\) *\{", self.text))

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without assignments, redirections and what a heredoc holds."""
        text = self.text.partition("\n")[0] if _HEREDOC.search(self.text) else self.text
        found: list[list[str]] = [[]]
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for word, before in zip(words, ["", *words], strict=False):
            if word in _SEPARATORS:
                found.append([])
            elif not set(word) <= set("<>") and not (before and set(before) <= set("<>")):
                found[-1].append(word)
        return [command for words in found if (command := _command(words))]


def _command(words: list[str]) -> list[str]:
    if words[1:3] == ["()", "{"]:
        words = words[3:]
    while words and (words[0] in {"do", "done", "then", "fi", "}", "exec", "sudo"} or re.match(r"\w+=", words[0])):
        words = words[1:]
    return [] if words[:1] in (["for"], ["if"], ["while"]) else words


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks in one of these languages."""
    return [
        Block(str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page in PAGES
        for text in [page.read_text("utf-8")]
        for match in _BLOCK.finditer(text)
        if match[1] in languages
    ]


def steps() -> list[Step]:
    """Return all command lines, page by page."""
    return [step for block in blocks("sh", "bash", "console") for step in _steps(block)]


def inline_steps() -> list[Step]:
    """Return the commands that stand within sentences."""
    return [
        Step(Block(str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 1, "", ""), match[1])
        for page in PAGES
        for text in [page.read_text("utf-8")]
        for match in _INLINE.finditer(text)
    ]


def _steps(block: Block) -> Iterator[Step]:
    step: Step | None = None
    for line in block.text.splitlines():
        if step is not None and not _is_complete(step.text):
            step.text += "\n" + line
        elif block.language != "console" or line.startswith("$ "):
            if step is not None:
                yield step
            step = Step(block, line.removeprefix("$ ")) if line.strip() and not line.startswith("#") else None
        elif step is not None:
            step.shown.append(line)
    if step is not None:
        yield step


def _is_complete(text: str) -> bool:
    if heredoc := _HEREDOC.search(text):
        return text.endswith(f"\n{heredoc[1]}")
    return not text.endswith("\\") and (not text.startswith("for ") or bool(re.search(r"\bdone\b", text)))
