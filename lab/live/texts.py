"""Text in place of what a trace only counts."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from random import Random

from lab.bench.prompts import TokenScale, random_text
from lab.trace import TraceRecord

_KEPT_BLOCKS = 8192  # of 512 words: some 25 MB


class Texts:
    """Writes prompts as long as a trace says, out of words drawn at random.

    Two requests begin with the same text as far as their prefix blocks are the same, so that a prefix cache can save as
    much of them as of those that were recorded; else no two have anything in common.

    Parameters
    ----------
    scale
        How many tokens the engine counts for so many words.
    seed
        Another one gives other texts, of which a cache knows nothing.
    """

    def __init__(self, scale: TokenScale, seed: str) -> None:
        self._scale = scale
        self._seed = seed
        self._blocks: OrderedDict[tuple[int, int], str] = OrderedDict()

    def prompt(self, record: TraceRecord, number: int) -> str:
        """Return the text of request `number`, of about `record.prompt_tokens` tokens."""
        words = self._scale.words(record.prompt_tokens)
        ends = [
            min(words, round(record.block_tokens * place / self._scale.per_word))
            for place in range(len(record.prefix_blocks) + 1)
        ]
        parts = [
            self._block(block, end - begin)
            for block, (begin, end) in zip(record.prefix_blocks, pairwise(ends), strict=True)
            if end > begin
        ]
        if words > ends[-1]:
            parts.append(random_text(Random(f"{self._seed}/{number}"), words - ends[-1]))
        return " ".join(parts)

    def _block(self, block: int, words: int) -> str:
        """Return the first words of a block."""
        text = self._blocks.get((block, words))
        if text is None:
            text = random_text(Random(f"{self._seed}/block/{block}"), words)
            self._blocks[block, words] = text
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end((block, words))
        return text
