"""How much of a text looks like source code, by its lines."""

from __future__ import annotations

import re

FENCE = "```"

# Each alternative is anchored to a line's start and none can leave its line or backtrack over a run of blanks: the cost
# stays proportional to the text, whatever a client sends.
_CODE_LINE = re.compile(
    r"""
    ^(?:
        (?:\ \ |\t)[ \t]*+(?![-*+\u2022\n]|\d++[.)])              # indented, and no item of a list
      | (?:def|class|async|import|from|return|elif|except|func|fn|let|const|var|public|private|protected|static|struct
          |enum|package|using|namespace|typedef|template|interface|impl|pub|use|mod|void|int|export|function)\b
          .*[;:{(=,)\w>][ \t]*$                                   # a keyword at the start, no sentence at the end
      | (?:\#include|\#define|\#!|//|/\*|@\w++(?:$|\()|</?\w++[^>\n]*+>|>>>\ |\$\ )  # what only code begins with
      | .*[;{}][ \t]*$                                            # a statement or a brace at the end
      | [\w.\[\]'"]++[ \t]*+(?:[-*+/|&:]?=)[ \t]*+[^\s].*(?<![.?!])$  # an assignment
      | [\w.]++\(.*\)[ \t]*:?$                                    # a bare call
      | [)\]]++[,;:]?[ \t]*$                                      # a closing bracket alone
      | (?:SELECT|INSERT|UPDATE|DELETE|CREATE|FROM|WHERE|JOIN|GROUP\ BY|ORDER\ BY)\ \w           # SQL
    )
    """,
    re.MULTILINE | re.VERBOSE,
)


def code_share(text: str) -> float:
    """Return the share of a text's lines, blank ones aside, that look like source code, 0 to 1.

    What stands between code fences is code; elsewhere a line's shape decides.
    """
    if FENCE not in text:
        lines = _lines(text)
        return len(_CODE_LINE.findall(text)) / lines if lines else 0.0
    code = total = 0
    for position, part in enumerate(text.split(FENCE)):
        lines = _lines(part)
        total += lines
        code += lines if position % 2 else len(_CODE_LINE.findall(part))
    return min(1.0, code / total) if total else 0.0


def _lines(text: str) -> int:
    return len([line for line in text.split("\n") if line and not line.isspace()])
