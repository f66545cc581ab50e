"""The rules of suffix decoding: trees that count runs of tokens, and the replay of a text on two of them.

`_suffix.c` has the same rules for compiled builds.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

_SPLIT = 2.0**29 + 1


def _single(number: float) -> float:
    """Round to single precision (Veltkamp), as arctic-inference computes, so that near ties have the same winner."""
    high = number * _SPLIT
    return high - (high - number)


class _Node:
    """The last tokens of a run: what follows the runs of the nodes above."""

    __slots__ = ("children", "count", "length", "ranked", "start", "text")

    def __init__(self, count: int, text: list[int], start: int, length: int) -> None:
        self.count = count  # how often the run occurred
        # text, start, length: the label is `text[start : start + length]`, where the run occurred. A leaf, a run that
        # occurred once, has length 0 and continues to the end of its text, or to the depth of the tree, so that it
        # grows at no cost.
        self.text = text
        self.start = start
        self.length = length
        if length:
            self.children: dict[int, _Node] = {}
            self.ranked: list[_Node] = []

    def set_only_child(self, child: _Node) -> None:
        self.children = {child.text[child.start]: child}
        self.ranked = [child]

    def run(self, offset: int, limit: int) -> list[int]:
        """Return the tokens of the label or leaf from an offset, at most `limit`."""
        begins = self.start + offset
        return self.text[begins : begins + (min(limit, self.length - offset) if self.length else limit)]


def _rise(ranked: list[_Node], child: _Node) -> int:
    """Move a child whose count is about to rise by 1, and return its index.

    The first of those with its count goes before all with the next count, another one after all of those. This
    reproduces the order in arctic-inference.
    """
    index = ranked.index(child)
    if index == 0:
        return 0
    above = ranked[index - 1].count
    if above > child.count + 1:
        return index
    to = index - 1
    while to and ranked[to - 1].count == above:
        to -= 1
    del ranked[index]
    ranked.insert(to, child)
    return to


def _fall(ranked: list[_Node], child: _Node) -> None:
    """Move a child whose count is about to fall by 1."""
    index = to = ranked.index(child)
    while to + 1 < len(ranked) and ranked[to + 1].count == child.count:
        to += 1
    if to > index:
        del ranked[index]
        ranked.insert(to, child)


class SuffixTree:
    """The counts of all runs of up to `depth` tokens in a number of texts, of which the newest can grow.

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
        self.root = _Node(0, [], 0, 1)
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
        for length in range(len(active) - 1, -1, -1):  # longest first, since the leaves have already grown
            node = active[length]
            child = node.children.get(token)
            if child is None:
                leaf = node.children[token] = _Node(1, text, len(text) - 1, 0)
                node.ranked.append(leaf)
            elif child.length:
                following.append(self._step(node, child, length))
            else:
                following.append(self._step_into_leaf(node, child, length))
        following.append(self.root)
        following.reverse()
        self.active = following

    def _step(self, node: _Node, child: _Node, length: int) -> _Node:
        """Return the node that follows `node`, `length` tokens deep, after the first token of its child."""
        if length and node.count == child.count + 1:
            # All other runs through this node continue with this token: extend its label instead of adding a child.
            self._grow_label(node)
            if child.length == 1:
                node.children, node.ranked = child.children, child.ranked
            else:
                child.start += 1
                child.length -= 1
                node.set_only_child(child)
            return node
        index = _rise(node.ranked, child) if length else 0
        if child.length > 1:
            upper = _Node(child.count, child.text, child.start, 1)
            node.children[child.text[child.start]] = upper
            if length:
                node.ranked[index] = upper
            child.start += 1
            child.length -= 1
            upper.set_only_child(child)
            child = upper
        child.count += 1
        return child

    def _step_into_leaf(self, node: _Node, leaf: _Node, length: int) -> _Node:
        """Return the node that follows `node` after the first token of a leaf, whose count rises to 2."""
        onward = leaf.start + 1
        ends = length + 1 >= self.depth or onward >= len(leaf.text)
        if length and node.count == 2:
            self._grow_label(node)
            if ends:
                node.children, node.ranked = {}, []
            else:
                leaf.start = onward
                node.set_only_child(leaf)
            return node
        if length:
            _rise(node.ranked, leaf)
        leaf.count, leaf.length = 2, 1
        if ends:
            leaf.children, leaf.ranked = {}, []
        else:
            leaf.set_only_child(_Node(1, leaf.text, onward, 0))
        return leaf

    def _grow_label(self, node: _Node) -> None:
        """Add the newest token to a label that ends before it."""
        node.text = self.newest
        node.start = len(self.newest) - 1 - node.length
        node.length += 1

    def forget(self, text: list[int]) -> None:
        """Subtract the counts of a text; not while the newest one grows."""
        for start in range(len(text)):
            node, at, end = self.root, start, min(start + self.depth, len(text))
            while at < end:
                child = node.children[text[at]]
                if child.count == 1:
                    del node.children[text[at]]
                    if node is not self.root:
                        node.ranked.remove(child)
                    break
                if node is not self.root:
                    _fall(node.ranked, child)
                child.count -= 1
                at += child.length
                node = child

    def locate(self, run: list[int]) -> tuple[_Node, int] | None:
        """Return where a run ends: its node and an offset in the node's label; None if the run did not occur."""
        node, offset, at = self.root, 0, 0
        while at < len(run):
            child = node.children.get(run[at]) if node.length else None
            if child is None:
                return None
            held = child.run(0, len(run) - at)
            if held != run[at : at + len(held)]:
                return None
            node, offset = child, len(held)
            at += offset
        return node, offset

    def follow(self, node: _Node, offset: int, limit: int, min_prob: float) -> tuple[float, list[int]]:
        """Return the most frequent continuation of a place, of at most `limit` tokens, and its score.

        It ends before a token where the joint probability of its tokens is less than `min_prob`. The score is the sum
        of these probabilities.
        """
        draft = node.run(offset, limit)
        score, prob = float(len(draft)), 1.0
        while len(draft) < limit and node.length and node.ranked:
            child = node.ranked[0]
            if child.count != node.count:
                prob = _single(prob * _single(child.count / node.count))
            if prob < min_prob:
                break
            more = child.run(0, limit - len(draft))
            draft += more
            if prob == 1.0:
                score += len(more)  # exact, since the score is still a whole number
            else:
                for _ in more:  # _single(score + prob), whose call would take most of the time
                    high = (score + prob) * _SPLIT
                    score = high - (high - (score + prob))
            node = child
        return score, draft


class SuffixTrees:
    """A tree of the answers of earlier requests, and the replay of texts on it and on a tree of each text's own.

    The parameters are those of `SuffixCache`.
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
        # [m] is the maximum number of tokens of a draft for a match of m tokens
        self._limits = [
            int(min(num_speculative_tokens, length * max_spec_factor + 1e-6, max_tree_depth - length))
            for length in range(max_tree_depth)
        ]

    def replay(self, text: Ints, prompt_tokens: int, learn: bool, emitted: Ints, drafted: Ints) -> None:
        """Store what each step of a text emits and drafts, and add its answer to the tree if `learn` is set."""
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

        Of drafts with equal scores, the one with the longest match wins.
        """
        matches = min(len(tree.active) - 1, len(context))
        places = [(node, node.length) for node in tree.active[1 : matches + 1]]
        if matches == len(tree.newest):  # the match may start before the answer: only those of earlier answers do
            while matches < len(context) and (place := tree.locate(context[-matches - 1 :])):
                places.append(place)
                matches += 1
        limits, score = self._limits, best[0]
        for length in range(matches, 0, -1):
            limit = min(limits[length], room)
            if limit > score:  # a score is at most the number of tokens
                found = tree.follow(*places[length - 1], limit, self.min_prob)
                if found[0] > score:
                    best = found
                    score = found[0]
        return best
