"""The words of an answer: those of the corpus, exchanged for others of their kind, differently in each answer.

The corpus is small. If answers kept its words, a suffix tree of earlier answers would know all of it after some hundred
thousand tokens, and draft what no real answer lets it draft.
"""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword

from backends.simulator.text.tokenizer import Tokenizer

_SHORTEST = 3
"""Letters of a word that is exchanged. Of chats at temperature 0.7 suffix drafting then emits 1.12 tokens per step in
the first 250, and 1.24 in the fourth thousand; with 4 letters it rises to 1.36, with 5 to 1.55. Of recorded chats,
which repeat themselves more, it emits 1.55 early and late: what must not grow is what earlier answers bring.
"""


class Words:
    """The words among the tokens, by kind: whether they follow a blank, and how they are capitalised."""

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
        """Return the function from tokens of the corpus to those of the answer with a number."""
        kind_of, index_of = self._kind_of, self._index_of

        def own(token: int) -> int:
            kind = kind_of[token]
            return token if kind is None else kind[(index_of[token] + number) % len(kind)]

        return own
