"""The share of a text's lines that look like source code, judged by how they begin."""

from __future__ import annotations

import re

# Each match starts at a line feed, which is found at memchr speed, so the cost grows with the number of lines. No
# alternative can backtrack over a run of blanks, whatever a client sends.
_CODE_LINE = re.compile(
    r"""
    \n(?:
        (?:\ \ |\t)[ \t]*+(?![-*+\u2022\n]|\d++[.)]|\Z)         # indented, but not a list item
      | (?:def|class|import|from|return|async|export|public|private|protected|static|const|let|var|function|func|fn|pub
          |impl|struct|enum|package|using|namespace|typedef|template|interface|void|SELECT|INSERT|CREATE)\b
      | (?:\#include|\#define|\#!|//|/\*|@\w|>>>\ )              # starts only code
      | [)\]}]                                                  # a closing bracket
    )
    """,
    re.VERBOSE,
)


def code_share(text: str) -> float:
    """Return the share of a text's non-empty lines that begin like source code, 0 to 1.

    Code fences are ignored: the text may be the end of a longer one, so its first fence may close or open a block.

    Examples
    --------
    >>> code_share("def double(x):"), code_share("How do I double a number?")
    (1.0, 0.0)
    """
    return _share(text)


def share_by_expression(text: str) -> float:
    """Return the same as `code_share`, computed in Python."""
    lines = len(list(filter(None, text.split("\n"))))
    return min(1.0, len(_CODE_LINE.findall("\n" + text)) / lines) if lines else 0.0


try:
    from policies.features._tail import code_share as _share  # exists in a compiled build
except ImportError:
    _share = share_by_expression
