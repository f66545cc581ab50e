"""How much of a text looks like source code, by how its lines begin."""

from __future__ import annotations

import re

# A line's end is found as fast as bytes are compared, and what begins the next line decides it: the cost is that of
# the lines, not of the characters, and nothing here can backtrack over a run of blanks, whatever a client sends.
_CODE_LINE = re.compile(
    r"""
    \n(?:
        (?:\ \ |\t)[ \t]*+(?![-*+\u2022\n]|\d++[.)]|\Z)         # indented, and no item of a list
      | (?:def|class|import|from|return|async|export|public|private|protected|static|const|let|var|function|func|fn|pub
          |impl|struct|enum|package|using|namespace|typedef|template|interface|void|SELECT|INSERT|CREATE)\b
      | (?:\#include|\#define|\#!|//|/\*|@\w|>>>\ )              # what only code begins with
      | [)\]}]                                                  # a closing bracket
    )
    """,
    re.VERBOSE,
)


def code_share(text: str) -> float:
    """Return the share of a text's lines, empty ones aside, that begin like source code, 0 to 1.

    Fences do not count: where the text is the end of a longer one, its first fence may as well close as open.
    """
    return _share(text)


def share_by_expression(text: str) -> float:
    """Return it in Python."""
    lines = len(list(filter(None, text.split("\n"))))
    return min(1.0, len(_CODE_LINE.findall("\n" + text)) / lines) if lines else 0.0


try:
    from policies.features._tail import code_share as _share  # where the gateway was built compiled
except ImportError:
    _share = share_by_expression
