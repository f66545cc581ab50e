"""An n-gram language model that follows a corpus and jumps between positions with similar context.

Following the corpus from one position is an n-gram model of unbounded order. Jumping to another position backs off to
the order of the tokens that precede both. How often it jumps, and how short that context may be, determines how random
the text is.

Its corpora come with every Python: the reference pages of `pydoc_data.topics` serve as prose, modules of the standard
library as code. The project neither ships nor downloads any text.
"""

from __future__ import annotations

import sysconfig
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

_CODE_MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "configparser.py",
    "csv.py",
    "dataclasses.py",
    "difflib.py",
    "enum.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "queue.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "textwrap.py",
)


_ORDERS = 3


def prose() -> str:
    """Return the Python reference pages as one text, about 450,000 characters."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


def code() -> str:
    """Return the source of some modules of the standard library, about 600,000 characters.

    Skips modules that the installation lacks; without any sources the text is empty.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = (library / name for name in _CODE_MODULES)
    return "\n\n".join(source.read_text(encoding="utf-8") for source in sources if source.is_file())


class CorpusModel:
    """The n-gram model of one corpus.

    Examples
    --------
    >>> CorpusModel([1, 2, 3, 1, 2, 4], vocabulary=5).jump([2, 3], 2, Random(0))
    2
    """

    def __init__(self, ids: Sequence[int], vocabulary: int) -> None:
        self.ids = list(ids) or [0]  # the corpus as token ids
        self._base = vocabulary
        tokens = np.asarray(self.ids, dtype=np.int64)
        keys = tokens * vocabulary**2
        keys[1:] += tokens[:-1] * vocabulary
        keys[2:] += tokens[:-2]
        order = np.argsort(keys[:-1], kind="stable")  # the last position has no continuation
        self._places: list[int] = order.tolist()
        self._keys: list[int] = keys[order].tolist()
        firsts = np.arange(vocabulary + 1, dtype=np.int64) * vocabulary**2
        self._firsts: list[int] = np.searchsorted(keys[order], firsts).tolist()  # start of each token's positions

    def span(self, context: Sequence[int], order: int) -> tuple[int, int]:
        """Return the half-open range of indexes of `_places` whose last `order` tokens (1 to 3) equal `context`'s."""
        first, end = self._firsts[context[-1]], self._firsts[context[-1] + 1]
        if order == 1:
            return first, end
        base = self._base
        low, width = (context[-1] * base + context[-2]) * base, base
        if order == _ORDERS:
            low, width = low + context[-3], 1
        begin = bisect_left(self._keys, low, first, end)
        return begin, bisect_left(self._keys, low + width, begin, end)

    def jump(self, context: Sequence[int], order: int, random: Random) -> int:
        """Choose a position whose context ends like `context`, backing off from `order` tokens down to none."""
        for length in range(min(order, len(context)), 0, -1):
            low, high = self.span(context, length)
            if high > low:
                return self._places[low + int(random.random() * (high - low))]
        return int(random.random() * (len(self.ids) - 1))

    def sentence_about(self, topic: Sequence[int], starts: frozenset[int], random: Random) -> int:
        """Return a position just before a sentence that contains a rare token of `topic`."""
        rare = []
        for token in dict.fromkeys(topic):
            low, high = self.span([token], 1)
            if 0 < high - low <= 60:
                rare.append((low, high))
        if rare:
            low, high = rare[int(random.random() * len(rare))]
            place = self._places[low + int(random.random() * (high - low))]
        else:
            place = int(random.random() * (len(self.ids) - 1))
        for position in range(place, max(0, place - 60), -1):
            if self.ids[position] in starts:
                return position
        return place
