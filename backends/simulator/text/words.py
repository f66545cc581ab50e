"""The words of an answer: the corpus's, exchanged for others of their kind, differently in each answer.

The corpus is small. If answers kept its words, a suffix tree of earlier answers would know all of it after a few
hundred thousand tokens, and draft far better than on real answers.
"""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword

from backends.simulator.text.tokenizer import Tokenizer

_SHORTEST = 3
"""Letters of the shortest exchanged word. On chats at temperature 0.7 suffix drafting then emits 1.12 tokens per step
in the first 250, and 1.24 in the fourth thousand; with 4 letters that rises to 1.36, with 5 to 1.55. On recorded chats,
which repeat themselves more, it emits 1.55 early and late: the gain from earlier answers must not grow.
"""


class Words:
    """The words among the tokens, by kind: whether they follow a blank, and their capitalization."""

    def __init__(self, tokens: Tokenizer) -> None:
        kinds: dict[tuple[bool, bool], list[int]] = {}
        self._kind_of: list[list[int] | None] = [None] * len(tokens)
        self._index_of = [0] * len(tokens)
        for token in range(len(tokens)):
            text = tokens.string(token)
            word = text.removeprefix(" ")
            if len(word) >= _SHORTEST and word.isascii() and word.isalpha() and not iskeyword(word):
                kind = kinds.setdefault((word != text, word[0].isupper()), [])
                self._kind_of[token], self._index_of[token] = kind, len(kind)
                kind.append(token)

    def of_answer(self, number: int) -> Callable[[int], int]:
        """Return the function from tokens of the corpus to those of answer `number`."""
        kind_of, index_of = self._kind_of, self._index_of

        def own(token: int) -> int:
            kind = kind_of[token]
            return token if kind is None else kind[(index_of[token] + number) % len(kind)]

        return own
