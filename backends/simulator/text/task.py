"""Recognizes from a prompt's words what it asks for: the kind of answer, and any text to copy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.calibration.calibration import Kind


@dataclass(frozen=True, slots=True)
class WritingTask:
    """A prompt's recognized task."""

    kind: Kind
    continues: bool = False  # whether the answer continues the prompt instead of answering it
    passage: str = ""  # text of the prompt that the answer copies; empty for a free answer
    edit_rate: float = 0.0  # probability that an edit starts at a token of the passage
    # opening, closing: text around the answer, such as a code fence.
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


# The first pattern that matches the instruction decides. Edit rates reflect how much of the source such answers keep:
# repetitions all, corrections most, rewrites half.
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


def understand(prompt: str) -> WritingTask:
    r"""Return the task that `prompt` asks for.

    Examples
    --------
    >>> understand("def add(a, b):").kind
    <Kind.CODE: 'code'>
    >>> task = understand('<|im_start|>user\nFix the spelling: "Ther is a mistake in this lnoger sentence."<|im_end|>')
    >>> task.passage, task.edit_rate
    ('Ther is a mistake in this lnoger sentence.', 0.02)
    """
    request = last_request(prompt)
    if request is prompt:
        return WritingTask(Kind.CODE if _looks_like_code(prompt[-2000:], 1) else _written_kind(prompt), continues=True)
    passage, language = _passage(request)
    instruction = _instruction(request, passage)
    for pattern, edit_rate in _COPYING:
        if passage and pattern.search(instruction):
            fenced = language is not None
            kind = Kind.CODE if _looks_like_code(passage) else Kind.EXTRACTION
            return WritingTask(
                kind, False, passage, edit_rate, f"```{language}\n" if fenced else "", "\n```" if fenced else ""
            )
    if passage and _TRANSLATING.search(instruction):
        return WritingTask(Kind.TRANSLATION)
    kind = _written_kind(instruction)
    if kind is Kind.CHAT and _looks_like_code(request):
        kind = Kind.CODE
    fence = ("```python\n", "\n```") if kind is Kind.CODE else ("", "")
    return WritingTask(kind, opening=fence[0], closing=fence[1])


def last_request(prompt: str) -> str:
    """Return the last user turn of a ChatML conversation; `prompt` itself if it is not one."""
    turns = _TURN.findall(prompt)
    return turns[-1] if turns else prompt


def _written_kind(instruction: str) -> Kind:
    return next((kind for pattern, kind in _WRITING if pattern.search(instruction)), Kind.CHAT)


def _instruction(request: str, passage: str) -> str:
    """Return the text around the passage."""
    if not passage:
        return request[:_INSTRUCTION_CHARACTERS] + "\n" + request[-_INSTRUCTION_CHARACTERS:]
    before, _, after = request.partition(passage)
    return before[-_INSTRUCTION_CHARACTERS:] + "\n" + after[:_INSTRUCTION_CHARACTERS]


def _passage(request: str) -> tuple[str, str | None]:
    """Return the text that the request is about, and the language of its code fence (None without a fence).

    The text is the longest fenced block; else the longest quotation; else what follows the first line or colon, if that
    is most of the request.
    """
    fences = _FENCE.findall(request)
    if fences:
        language, block = max(fences, key=lambda fence: len(fence[1]))
        return block, language
    quotations = [
        next(part for part in (three, single, tagged) if part) for three, single, _, tagged in _QUOTED.findall(request)
    ]
    rest = ""
    for mark in ("\n", ":"):
        before, separator, after = request.partition(mark)
        if separator and len(after.strip()) > len(before):
            rest = after.strip("\n ")
            break
    longest = max(quotations, key=len, default="")
    return (longest if len(longest) > 0.6 * len(rest) else rest), None


def _looks_like_code(text: str, min_lines: int = 3) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) >= min_lines and sum(bool(_CODE_LINE.match(line)) for line in lines) > 0.2 * len(lines)
