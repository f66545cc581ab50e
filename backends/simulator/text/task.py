"""What a prompt asks for, told from its words: the kind of text to come, and what of the prompt to copy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.calibration.calibration import Kind


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked.

    Parameters
    ----------
    continues
        Whether the answer goes on where the prompt ends, instead of answering it.
    passage
        Text of the prompt that the answer is a copy of; empty where the answer is written freely.
    edit_rate
        Probability per token of the passage that an edit starts there.
    opening, closing
        What stands around the answer: a code fence.
    """

    kind: Kind
    continues: bool = False
    passage: str = ""
    edit_rate: float = 0.0
    opening: str = ""
    closing: str = ""


_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_FENCE = re.compile(r"```([\w+-]*)\n(.*?)\n?```", re.DOTALL)
_QUOTED = re.compile(r"\"\"\"(.{40,}?)\"\"\"|\"([^\"\n]{40,})\"|<(\w+)>\n?(.{40,}?)</\3>", re.DOTALL)
_CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \w+ import|return\b|for .*:|if .*:|#include|function |const |let |public |\}|@\w+)"
)


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b({pattern})\b", re.IGNORECASE)


# The first of these to match within the instruction decides. Rates of edits are by how much such answers keep of
# their source: a repetition all, a correction most, a rewriting half.
_COPYING = (
    (_words(r"repeat|copy|echo|reproduce|verbatim|print (it|this) back|exactly as"), 0.0),
    (_words(r"fix|correct|proofread|lint|(re)?format|rename|add (type|docstring|comment|error)\w*|debug"), 0.02),
    (_words(r"edit|refactor|modify|update|change|replace|convert|complete|extend|apply|migrate"), 0.04),
    (_words(r"rewrite|rephrase|paraphrase|improve|simplify|optimi[sz]e"), 0.10),
)
_TRANSLATING = _words(r"translate|translation|in (french|german|spanish|japanese|chinese)")
_SOFTWARE = r"function|class|method|code|python|program|script|javascript|rust|sql|java|api|tests?|regex"
_WRITING = (
    (_words(r"summari[sz]e|summary|tl;?dr|abstract|key points|in brief"), Kind.SUMMARIZATION),
    (_words(r"extract|find all|list (all|every|the)|which of the following|quote"), Kind.EXTRACTION),
    (_words(r"according to|(from|in|given) the (text|document|context|passage)|based on the"), Kind.RAG),
    (_words(rf"(write|implement|create|generate|code|program|script)\b[^.?!]*\b({_SOFTWARE})"), Kind.CODE),
    (_words(r"step by step|think carefully|reason about|prove"), Kind.REASONING),
    (_words(r"solve|calculate|compute|how many|how much|equation|integral|probability|percent"), Kind.MATH),
    (re.compile(r"\d\s*[-+*/=]\s*\d"), Kind.MATH),
)
_INSTRUCTION_CHARACTERS = 400


def understand(prompt: str) -> Task:
    """Tell what `prompt` asks for.

    Parameters
    ----------
    prompt
        A ChatML conversation, of which the last user turn counts, or a bare text to go on from.
    """
    asked = last_request(prompt)
    if asked is prompt:
        return Task(Kind.CODE if _looks_like_code(prompt[-2000:], 1) else _written_kind(prompt), continues=True)
    passage, language = _passage(asked)
    instruction = _instruction(asked, passage)
    for pattern, edit_rate in _COPYING:
        if passage and pattern.search(instruction):
            fenced = language is not None
            kind = Kind.CODE if _looks_like_code(passage) else Kind.EXTRACTION
            return Task(
                kind, False, passage, edit_rate, f"```{language}\n" if fenced else "", "\n```" if fenced else ""
            )
    if passage and _TRANSLATING.search(instruction):
        return Task(Kind.TRANSLATION)
    kind = _written_kind(instruction)
    if kind is Kind.CHAT and _looks_like_code(asked):
        kind = Kind.CODE
    fence = ("```python\n", "\n```") if kind is Kind.CODE else ("", "")
    return Task(kind, opening=fence[0], closing=fence[1])


def last_request(prompt: str) -> str:
    """Return the last user turn of a ChatML conversation; `prompt` itself if it is none."""
    turns = _TURN.findall(prompt)
    return turns[-1] if turns else prompt


def _written_kind(instruction: str) -> Kind:
    return next((kind for pattern, kind in _WRITING if pattern.search(instruction)), Kind.CHAT)


def _instruction(asked: str, passage: str) -> str:
    """Return what is said around the passage."""
    if not passage:
        return asked[:_INSTRUCTION_CHARACTERS] + "\n" + asked[-_INSTRUCTION_CHARACTERS:]
    before, _, after = asked.partition(passage)
    return before[-_INSTRUCTION_CHARACTERS:] + "\n" + after[:_INSTRUCTION_CHARACTERS]


def _passage(asked: str) -> tuple[str, str | None]:
    """Return the text that the request is about, and the language of its fence (None where it has none).

    The longest fenced block; else the longest quotation; else what follows the first line or the first colon, if
    that is the greater part of it.
    """
    fences = _FENCE.findall(asked)
    if fences:
        language, block = max(fences, key=lambda fence: len(fence[1]))
        return block, language
    quotations = [
        next(part for part in (three, one, tagged) if part) for three, one, _, tagged in _QUOTED.findall(asked)
    ]
    rest = ""
    for mark in ("\n", ":"):
        before, found, after = asked.partition(mark)
        if found and len(after.strip()) > len(before):
            rest = after.strip("\n ")
            break
    longest = max(quotations, key=len, default="")
    return (longest if len(longest) > 0.6 * len(rest) else rest), None


def _looks_like_code(text: str, least: int = 3) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) >= least and sum(bool(_CODE_LINE.match(line)) for line in lines) > 0.2 * len(lines)
