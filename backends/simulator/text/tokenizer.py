"""The simulated model's tokenizer: byte-level BPE with 4,096 entries, and a ChatML template.

The vocabulary, trained once on the corpus, is a packaged asset, so that token ids are the same everywhere.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as BpeTokenizer

END_OF_TEXT, START_OF_TURN, END_OF_TURN = range(3)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ASSET = Path(__file__).parent / "assets" / "tokenizer.json"


class Tokenizer:
    """Converts between text and token ids. Every text round-trips: the alphabet is the 256 bytes.

    Examples
    --------
    >>> tokenizer = load()
    >>> ids = tokenizer.encode("naïve prose")
    >>> tokenizer.decode(ids)
    'naïve prose'
    """

    def __init__(self, bpe: BpeTokenizer) -> None:
        self._bpe = bpe
        byte_of = _byte_of_character()
        self._bytes = [b""] * bpe.get_vocab_size()
        self._strings = [""] * bpe.get_vocab_size()
        for entry, token in bpe.get_vocab().items():
            special = entry in _SPECIAL
            self._bytes[token] = b"" if special else bytes(byte_of[character] for character in entry)
            self._strings[token] = entry if special else self._bytes[token].decode("utf-8", "replace")
        self._named = [*(name.encode() for name in _SPECIAL), *self._bytes[len(_SPECIAL) :]]

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; names of special tokens in it become those tokens."""
        ids: list[int] = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids  # without the GIL
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`, with special tokens by name if `special` is set, else without them."""
        table = self._named if special else self._bytes
        return b"".join([table[token] for token in ids]).decode("utf-8", "replace")

    def string(self, token: int) -> str:
        """Return the text of a single token; incomplete characters become U+FFFD."""
        return self._strings[token]

    def pieces(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of `ids`, and how many of its characters can be shown after each token.

        A character split over several tokens can be shown after the last one, as in a streaming server.
        """
        joined = [self._bytes[token] for token in ids]
        text = b"".join(joined)
        if text.isascii():
            return text.decode("ascii"), list(accumulate(map(len, joined)))
        decoder = getincrementaldecoder("utf-8")("replace")
        parts = []
        complete = True  # whether the text ends with a complete character
        last = len(joined) - 1
        for index, piece in enumerate(joined):
            if complete and piece.isascii():
                parts.append(self._strings[ids[index]] if piece else "")
            else:
                parts.append(decoder.decode(piece, index == last))
                complete = not decoder.getstate()[0]
        return "".join(parts), list(accumulate(map(len, parts)))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation in the ChatML template, ready for the assistant's answer."""
        turns = []
        if tools:
            listed = "\n".join(orjson.dumps(tool).decode() for tool in tools)
            turns.append(("system", f"# Tools\n\nYou may call these functions:\n<tools>\n{listed}\n</tools>"))
        turns += [(str(message.get("role", "user")), _content_text(message)) for message in messages]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(text + "<|im_start|>assistant\n")


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        calls = message.get("tool_calls") or []
        return "\n".join(f"<tool_call>\n{orjson.dumps(call.get('function')).decode()}\n</tool_call>" for call in calls)
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


@cache
def load() -> Tokenizer:
    """Return the packaged tokenizer."""
    return Tokenizer(BpeTokenizer.from_file(str(_ASSET)))
