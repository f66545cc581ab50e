"""Generated texts for traces that only have lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from random import Random

from lab.trace.record import TraceRecord

# Common words: in nearly every BPE vocabulary each, with its leading space, is one token.
_WORDS = files("lab.live").joinpath("words.txt").read_text("utf-8").split()
_KEPT_BLOCKS = 8192  # of 512 words each, about 25 MB


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Number of tokens of a generated prompt: `fixed + per_word * words`.

    Examples
    --------
    >>> scale = TokenScale.through((10, 21), (110, 146))
    >>> scale.per_word, scale.words(271)
    (1.25, 210)
    """

    fixed: float = 0.0  # tokens of the chat template
    per_word: float = 1.0  # tokens per word

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> TokenScale:
        """Return the scale through two pairs of (words, tokens); the default if the counts do not increase."""
        words, tokens = large[0] - small[0], large[1] - small[1]
        if words <= 0 or tokens <= 0:
            return cls()
        per_word = tokens / words
        return cls(max(0.0, small[1] - per_word * small[0]), per_word)

    def words(self, tokens: int) -> int:
        """Return the number of words whose tokens are closest to `tokens`, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def random_text(random: Random, words: int) -> str:
    """Return `words` random words."""
    return " ".join(random.choices(_WORDS, k=words))


def every_word(random: Random) -> list[str]:
    """Return every word of generated prompts once, in random order: a text with exactly their mean tokens per word."""
    return random.sample(_WORDS, len(_WORDS))


class Texts:
    """Generates prompts of random words with the lengths of a trace.

    Prompts share the text of their common prefix blocks, so that a prefix cache saves as much as for the recorded
    prompts. Otherwise prompts share nothing.

    Examples
    --------
    >>> texts = Texts(TokenScale(), seed="0")
    >>> first, second = (texts.prompt(TraceRecord(prompt_tokens=600, prefix_blocks=[7]), n).split() for n in (0, 1))
    >>> len(first), first[:512] == second[:512], first[512:] == second[512:]
    (600, True, False)
    """

    def __init__(self, scale: TokenScale, seed: str) -> None:
        self._scale = scale  # the engine's tokens per word
        self._seed = seed  # another seed gives other texts, which no cache contains
        self._block = lru_cache(_KEPT_BLOCKS)(self._made)

    def prompt(self, record: TraceRecord, number: int) -> str:
        """Return the text of request `number`, of about `record.prompt_tokens` tokens."""
        words = self._scale.words(record.prompt_tokens)
        ends = [
            min(words, round(record.block_tokens * index / self._scale.per_word))
            for index in range(len(record.prefix_blocks) + 1)
        ]
        parts = [
            self._block(block, end - begin)
            for block, (begin, end) in zip(record.prefix_blocks, pairwise(ends), strict=True)
            if end > begin
        ]
        if words > ends[-1]:
            parts.append(random_text(Random(f"{self._seed}/{number}"), words - ends[-1]))
        return " ".join(parts)

    def _made(self, block: int, words: int) -> str:
        """Return the first words of a block."""
        return random_text(Random(f"{self._seed}/block/{block}"), words)
