"""What is asked of a replica and what it must answer: the one place that both sides read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

MODEL, LINES = "m", "lines"
"""The model of requests, and that of the lines of batches, which are counted apart."""
TOKEN_S = 0.01
"""Seconds a token."""
_WORD: Final = "REQ"
_FILLING_ID, _FIRST_ID, MOST_TOKENS = 300, 1000, 400
"""Ids of tokens: the bytes of the prompt's head, one for its filling, and one for each word of each answer."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a replica does for a request.

    Parameters
    ----------
    number
        Of the request; in each word of the answer.
    tokens
        Words of the whole answer, at most `MOST_TOKENS`.
    begins_at
        Words of it that the request has already.
    padding_bytes
        Size of a field that is added to each event.
    with_ids
        Whether the answer reports the ids of its tokens.
    """

    number: int
    tokens: int
    begins_at: int = 0
    is_chat: bool = True
    is_stream: bool = False
    padding_bytes: int = 0
    with_ids: bool = False

    @property
    def request_id(self) -> str:
        """Return the number as it is written."""
        return f"q{self.number}"

    @property
    def middle(self) -> int:
        """Return the token in the middle of what is left of the answer."""
        return (self.begins_at + self.tokens) // 2

    @property
    def prompt_ids(self) -> list[int]:
        """Return the ids of the prompt's tokens, those of the answer that it has included."""
        return [*self.prompt_head().encode(), _FILLING_ID, *map(self.word_id, range(self.begins_at))]

    def word_id(self, index: int) -> int:
        """Return a token's id."""
        return _FIRST_ID + MOST_TOKENS * self.number + index

    def word(self, index: int) -> str:
        """Return a token's text."""
        return f"{self.request_id}.{index} "

    def text(self, begin: int = 0, end: int | None = None) -> str:
        """Return the answer from a token on, up to its end or another one."""
        return "".join(self.word(index) for index in range(begin, self.tokens if end is None else end))

    def prompt_head(self) -> str:
        """Return what the prompt begins with."""
        return f"{_WORD} {self.number} {self.tokens} {self.padding_bytes} "

    def prompt(self, size_bytes: int) -> str:
        """Return the prompt, filled up with words to about `size_bytes`."""
        head = self.prompt_head()
        return head + "please " * ((size_bytes - len(head)) // 7)


def decoded(ids: list[int]) -> str:
    """Return the text of tokens of answers."""
    return "".join(Work(number, 0).word(index) for number, index in _words(ids))


def _words(ids: list[int]) -> list[tuple[int, int]]:
    return [divmod(token - _FIRST_ID, MOST_TOKENS) for token in ids if token >= _FIRST_ID]


def work_of(document: dict[str, Any], *, is_chat: bool) -> Work:
    """Return what a request asks for.

    Raises
    ------
    ValueError
        If it is none of `Work.prompt`, or goes on with tokens that are not the beginning of its answer.
    """
    asked = document["messages"][0]["content"] if is_chat else document["prompt"]
    ids: list[int] = [] if isinstance(asked, str) else asked
    text = asked if isinstance(asked, str) else bytes(token for token in ids if token < _FILLING_ID).decode()
    word, number, tokens, padding_bytes, *_ = text.split()
    if word != _WORD:
        raise ValueError(f"the prompt begins with {word!r}")
    begun = _words(ids)
    if begun != [(int(number), index) for index in range(len(begun))]:
        raise ValueError("the tokens to go on with are not the beginning of the answer")
    is_stream, with_ids = bool(document.get("stream")), bool(document.get("return_token_ids"))
    return Work(int(number), int(tokens), len(begun), is_chat, is_stream, int(padding_bytes), with_ids)
