"""Generated texts for traces that only have lengths."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from random import Random

from lab.bench.prompts import TokenScale, random_text
from lab.trace import TraceRecord

_KEPT_BLOCKS = 8192  # of 512 words each, about 25 MB


class Texts:
    """Generates prompts of random words with the lengths of a trace.

    Prompts share the text of their common prefix blocks, so that a prefix cache saves as much as for the recorded
    prompts. Otherwise no two prompts have anything in common.

    Examples
    --------
    >>> texts = Texts(TokenScale(), seed="0")
    >>> first, second = (texts.prompt(TraceRecord(prompt_tokens=600, prefix_blocks=[7]), n).split() for n in (0, 1))
    >>> len(first), first[:512] == second[:512], first[512:] == second[512:]
    (600, True, False)
    """

    def __init__(self, scale: TokenScale, seed: str) -> None:
        self._scale = scale  # tokens per word of the engine
        self._seed = seed  # seed; another one gives other texts, which no cache contains
        self._blocks: OrderedDict[tuple[int, int], str] = OrderedDict()

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
