"""The rules of suffix decoding: trees that count runs of tokens, and the replay of a text on two of them.

`_suffix.c` implements the same rules for compiled builds.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

_SPLIT = 2.0**29 + 1


def _single(number: float) -> float:
    """Round to single precision (Veltkamp), as arctic-inference does, so that near ties have the same winner."""
    high = number * _SPLIT
    return high - (high - number)


class _Node:
    """The last token of a run, which extends the run of the node above it.

    A leaf is a run that occurred once. It extends to the end of its text or the depth of the tree, so that growth costs
    nothing.
    """

    __slots__ = ("at", "children", "count", "ranked", "text", "token")

    def __init__(self, text: list[int], at: int) -> None:
        self.token = text[at]
        self.count = 1  # how often the run occurred
        # For a leaf: where its token is.
        self.text = text
        self.at = at
        self.children: dict[int, _Node] | None = None  # None for a leaf
        self.ranked: list[_Node] = []  # the children, most frequent first

    def grow(self, *, is_deepest: bool) -> None:
        """Turn a leaf into a node with one leaf below it."""
        text, onward = self.text, self.at + 1
        self.text, self.children = [], {}
        if not is_deepest and onward < len(text):
            child = self.children[text[onward]] = _Node(text, onward)
            self.ranked.append(child)


Place = tuple[_Node, int]
"""Where a run ends: a node and, in a leaf's text, the index after the run."""


def _rise(ranked: list[_Node], child: _Node) -> None:
    """Move a child whose count is about to rise by 1.

    The first child with its count moves before all with the next count, any other after them. This reproduces
    arctic-inference's order.
    """
    index = ranked.index(child)
    if index == 0:
        return
    above = ranked[index - 1].count
    if above > child.count + 1:
        return
    to = index - 1
    while to and ranked[to - 1].count == above:
        to -= 1
    del ranked[index]
    ranked.insert(to, child)


def _fall(ranked: list[_Node], child: _Node) -> None:
    """Move a child whose count is about to fall by 1."""
    index = to = ranked.index(child)
    while to + 1 < len(ranked) and ranked[to + 1].count == child.count:
        to += 1
    if to > index:
        del ranked[index]
        ranked.insert(to, child)


class SuffixTree:
    """The counts of all runs of up to `depth` tokens in several texts; only the newest can grow.

    Counts, and the order of equally frequent continuations, equal those of arctic-inference 0.1.1
    (`csrc/suffix_decoding/suffix_tree.cc`).

    Examples
    --------
    >>> tree = SuffixTree(depth=4)
    >>> for token in (1, 2, 1):
    ...     tree.append(token)
    >>> tree.root.children[1].count
    2
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth  # maximum length of a run, in tokens
        self.root = _Node([0], 0)
        self.root.children = {}  # their order does not matter
        self.begin()

    def begin(self) -> None:
        """Begin a new text."""
        self.newest: list[int] = []
        self.active = [self.root]  # [m] is the node of the last m tokens of the newest text, if they occurred before

    def append(self, token: int) -> None:
        """Append a token to the newest text."""
        text, active = self.newest, self.active
        text.append(token)
        if len(active) > self.depth:
            active.pop()
        following = []
        for length in range(len(active) - 1, -1, -1):  # longest first, as the leaves have already grown
            node = active[length]
            assert node.children is not None
            child = node.children.get(token)
            if child is None:
                leaf = node.children[token] = _Node(text, len(text) - 1)
                if length:
                    node.ranked.append(leaf)
                continue
            if child.children is None:
                child.grow(is_deepest=length + 1 >= self.depth)
            if length:
                _rise(node.ranked, child)
            child.count += 1
            following.append(child)
        following.append(self.root)
        following.reverse()
        self.active = following

    def forget(self, text: list[int]) -> None:
        """Subtract the counts of a text; must not be called while the newest one grows."""
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.depth]:
                assert node.children is not None
                child = node.children[token]
                if child.count == 1:
                    del node.children[token]
                    if node is not self.root:
                        node.ranked.remove(child)
                    break
                if node is not self.root:
                    _fall(node.ranked, child)
                child.count -= 1
                node = child

    def locate(self, run: list[int]) -> Place | None:
        """Return where a run ends; None if it did not occur."""
        node, at = self.root, 0
        for token in run:
            if node.children is None:
                if at >= len(node.text) or node.text[at] != token:
                    return None
                at += 1
            elif (child := node.children.get(token)) is not None:
                node, at = child, child.at + 1
            else:
                return None
        return node, at

    def follow(self, place: Place, limit: int, min_prob: float) -> tuple[float, list[int]]:
        """Return the most frequent continuation of a place, at most `limit` tokens long, and its score.

        It ends before the joint probability of its tokens falls below `min_prob`. The score is the sum of these
        probabilities.
        """
        node, at = place
        draft: list[int] = []
        score, prob = 0.0, 1.0
        while len(draft) < limit:
            if node.children is None:
                more = node.text[at : at + limit - len(draft)]
                limit = len(draft) + len(more)  # nothing comes after a leaf
            elif node.ranked:
                child = node.ranked[0]
                if child.count != node.count:
                    prob = _single(prob * _single(child.count / node.count))
                if prob < min_prob:
                    break
                more = [child.token]
                node, at = child, child.at + 1
            else:
                break
            draft += more
            for _ in more:  # _single(score + prob), inlined: a call would take most of the time
                high = (score + prob) * _SPLIT
                score = high - (high - (score + prob))
        return score, draft


class SuffixTrees:
    """A tree of earlier answers, and the replay of each text on it and on the text's own tree.

    The parameters are vLLM's `suffix_decoding_...`.
    """

    def __init__(
        self,
        max_tree_depth: int,
        max_spec_factor: float,
        min_token_prob: float,
        max_cached_requests: int,
        num_speculative_tokens: int,
        max_model_len: int,
    ) -> None:
        self.depth = max_tree_depth
        self.min_prob = _single(min_token_prob)
        self.max_cached = max_cached_requests
        self.max_model_len = max_model_len
        self.tree = SuffixTree(max_tree_depth)
        self._cached: deque[list[int]] = deque()
        # [m] is the maximum length of a draft for a match of m tokens
        self._limits = [
            int(min(num_speculative_tokens, length * max_spec_factor + 1e-6, max_tree_depth - length))
            for length in range(max_tree_depth)
        ]

    def replay(self, text: Ints, prompt_tokens: int, learn: bool, emitted: Ints, drafted: Ints) -> None:
        """Store what each step of a text emits and drafts; if `learn` is set, add its answer to the tree."""
        tokens, total = text.tolist(), len(text)
        remember, local, shared = self.max_cached > 0, SuffixTree(self.depth), self.tree
        while learn and self._cached and len(self._cached) >= self.max_cached:
            shared.forget(self._cached.popleft())
        shared.begin()
        for token in tokens[:prompt_tokens]:
            local.append(token)
        for known in range(prompt_tokens + 1, total + 1):
            token = tokens[known - 1]
            if remember:
                shared.append(token)
            if known == total:
                break
            local.append(token)
            context = tokens[max(known - self.depth, 0) + 1 : known]
            room = self.max_model_len - known - 1
            best = self._draft(local, context, room, (0.0, []))
            _, draft = self._draft(shared, context, room, best)
            position = known - prompt_tokens
            accepted, most = 0, min(len(draft), total - known - 1)
            while accepted < most and draft[accepted] == tokens[known + accepted]:
                accepted += 1
            emitted[position], drafted[position] = 1 + accepted, len(draft)
        if remember and learn:
            self._cached.append(shared.newest)
        elif remember:
            shared.forget(shared.newest)

    def _draft(
        self, tree: SuffixTree, context: list[int], room: int, best: tuple[float, list[int]]
    ) -> tuple[float, list[int]]:
        """Return the best draft and its score, or `best` if no draft has a higher score.

        Among equal scores, the longest match wins.
        """
        matches = min(len(tree.active) - 1, len(context))
        places = [(node, 0) for node in tree.active[1 : matches + 1]]
        if matches == len(tree.newest):  # only a match in earlier answers may start before the answer
            while matches < len(context) and (place := tree.locate(context[-matches - 1 :])):
                places.append(place)
                matches += 1
        limits, score = self._limits, best[0]
        for length in range(matches, 0, -1):
            limit = min(limits[length], room)
            if limit > score:  # a score is at most the number of tokens
                found = tree.follow(places[length - 1], limit, self.min_prob)
                if found[0] > score:
                    best = found
                    score = found[0]
        return best
