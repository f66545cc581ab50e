"""A suffix tree of bounded depth that counts: how often each run of tokens occurred, and what followed it."""

from __future__ import annotations

from collections.abc import Sequence

_SPLIT = 2.0**29 + 1


def _single(number: float) -> float:
    """Round to single precision (Veltkamp): arctic-inference reckons in it, and of near ties the same is to win."""
    high = number * _SPLIT
    return high - (high - number)


_END = -1
"""Between sequences in the buffer; no token has this id."""


class _Node:
    """A run of tokens, seen more than once.

    A child is another node or, for what was seen once, just the position in the buffer where it goes on: such
    leaves grow with their sequence at no cost. `ranked` has the first tokens of the children that were seen more
    than once, the most frequent first; the others rank behind, in the order of `children`.
    """

    __slots__ = ("children", "count", "label", "ranked")

    def __init__(self, label: list[int], count: int, children: dict[int, _Node | int]) -> None:
        self.label = label
        self.count = count
        self.children = children
        self.ranked: list[int] = []


class SuffixTree:
    """All runs of up to `depth` tokens in a number of sequences, with their counts.

    The counts, and the choice among equally frequent continuations, are those of arctic-inference 0.1.1
    (`csrc/suffix_decoding/suffix_tree.cc`). Only the newest sequence grows.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._root = _Node([], 0, {})
        self._tokens: list[int] = []
        self._base = 0  # buffer position of `_tokens[0]`
        self._length = 0  # of the newest sequence
        self._here: list[_Node] = []  # [m - 1]: the node that its last m tokens lead to, where they were seen before

    def begin(self) -> None:
        """Begin a new sequence."""
        if self._length:
            self._tokens.append(_END)
        self._length = 0
        self._here = []

    def append(self, token: int) -> None:
        """Let the newest sequence grow by a token."""
        self._tokens.append(token)
        self._length += 1
        here = self._here
        moved = []
        for length in range(min(len(here), self.depth - 1), -1, -1):  # longest first, as leaves have already grown
            node = self._step(here[length - 1] if length else self._root, token, length)
            if node is not None:
                moved.append(node)
        moved.reverse()
        self._here = moved

    def draft(
        self, longest: int, most: int, factor: float, min_prob: float, beyond: Sequence[int] = ()
    ) -> tuple[float, list[int]]:
        """Return the score of the best draft for what follows the newest sequence, and that draft.

        The draft after the last m tokens has up to m * factor tokens, each the most frequent continuation, as long
        as their joint probability is at least `min_prob`; its score is the sum of those probabilities. The best
        score wins, and of equal ones the longest match.

        Parameters
        ----------
        longest
            Longest match that counts.
        most
            Tokens drafted at most.
        beyond
            The last `longest` tokens known, where they begin before the newest sequence does; else empty.
        """
        best_score, best = 0.0, list[int]()
        places = [(node, len(node.label)) for node in self._here[:longest]]
        if beyond and len(places) == self._length:
            places += self._places_beyond(beyond, len(places))
        for length in range(len(places), 0, -1):
            limit = min(most, int(length * factor + 1e-6))
            if limit <= best_score:
                break  # as the score of a draft is at most its length, and shorter matches draft less
            if self.depth - length <= best_score:
                continue
            score, tokens = self._follow(*places[length - 1], length, limit, min_prob)
            if score > best_score:
                best_score, best = score, tokens
        return best_score, best

    def forget_oldest(self, length: int) -> None:
        """Forget the oldest sequence, which has `length` tokens; only before a new one begins."""
        self._subtract(self._tokens[:length])
        held = len(self._tokens)
        del self._tokens[: length + 1]
        self._base += held - len(self._tokens)
        self._here = []

    def forget_newest(self) -> None:
        """Forget the newest sequence."""
        first = len(self._tokens) - self._length
        self._subtract(self._tokens[first:])
        del self._tokens[first:]
        self._length = 0
        self._here = []

    def _step(self, node: _Node, token: int, length: int) -> _Node | None:
        """Move a suffix on by `token` from `node`, `length` tokens deep; None where that was never seen before."""
        children = node.children
        child = children.get(token)
        if child is None:
            children[token] = self._base + len(self._tokens) - 1
            return None
        if isinstance(child, int):
            following = self._leaf_token(child + 1, length + 1)
            onward: dict[int, _Node | int] = {} if following is None else {following: child + 1}
            if length and node.count == 2:
                # All others that pass this node go this way: it becomes longer instead of getting a child.
                node.label.append(token)
                node.children = onward
                return node
            if length:
                _rank_first_repeat(node, token)
            repeated = _Node([token], 2, onward)
            children[token] = repeated
            return repeated
        if length and node.count == child.count + 1:
            node.label.append(token)
            if len(child.label) == 1:
                node.children, node.ranked = child.children, child.ranked
            else:
                _hang_rest(node, child)
            return node
        if length:
            _rank_repeat(node, token, child.count)
        if len(child.label) > 1:
            upper = _Node([token], child.count, {})
            _hang_rest(upper, child)
            children[token] = child = upper
        child.count += 1
        return child

    def _leaf_token(self, position: int, length: int) -> int | None:
        """Return the buffer's token at `position`, `length` tokens below the root; None where the leaf ends."""
        index = position - self._base
        if length >= self.depth or index >= len(self._tokens) or self._tokens[index] == _END:
            return None
        return self._tokens[index]

    def _places_beyond(self, known: Sequence[int], length: int) -> list[tuple[_Node, int]]:
        """Return where the last length + 1, length + 2, ... of `known` lead: a node, and how far into its label."""
        places = []
        for start in range(len(known) - length - 1, -1, -1):
            place = self._find(known[start:])
            if place is None:
                break
            places.append(place)
        return places

    def _find(self, run: Sequence[int]) -> tuple[_Node, int] | None:
        node, offset = self._root, 0
        for index, token in enumerate(run):
            if offset == len(node.label):
                child = node.children.get(token)
                if child is None:
                    return None
                if isinstance(child, int):
                    rest = self._leaf_run(child, self.depth - index)
                    found = rest[: len(run) - index] == list(run[index:])
                    return (_Node(rest, 1, {}), len(run) - index) if found else None
                node, offset = child, 0
            if node.label[offset] != token:
                return None
            offset += 1
        return node, offset

    def _leaf_run(self, position: int, most: int) -> list[int]:
        """Return up to `most` tokens of a leaf from a position in the buffer."""
        start = position - self._base
        run = self._tokens[start : start + most]
        return run[: run.index(_END)] if _END in run else run

    def _follow(self, node: _Node, offset: int, length: int, limit: int, min_prob: float) -> tuple[float, list[int]]:
        """Return the score and tokens of the most frequent path from a place `length` tokens deep."""
        tokens = node.label[offset : offset + limit]
        score, prob = float(len(tokens)), 1.0
        min_prob = _single(min_prob)
        while len(tokens) < limit:
            if node.ranked:
                child = node.children[node.ranked[0]]
            elif node.children:
                child = next(iter(node.children.values()))
            else:
                break
            leaf = isinstance(child, int)
            count = 1 if isinstance(child, int) else child.count
            prob = _single(prob * _single(count / node.count))
            if prob < min_prob:
                break
            if isinstance(child, int):
                run = self._leaf_run(child, min(limit - len(tokens), self.depth - length - len(tokens)))
            else:
                run = child.label[: limit - len(tokens)]
                node = child
            tokens = tokens + run
            if prob == 1.0:
                score += len(run)  # exact, as the score is a whole number so far
            else:
                for _ in run:
                    score = _single(score + prob)
            if leaf:
                break
        return score, tokens

    def _subtract(self, sequence: list[int]) -> None:
        """Uncount a sequence."""
        for start in range(len(sequence)):
            node, at = self._root, start
            while at < min(start + self.depth, len(sequence)):
                token = sequence[at]
                child = node.children[token]
                if isinstance(child, int) or child.count == 1:
                    del node.children[token]
                    break
                if node is not self._root:
                    _rank_loss(node, token, child.count)
                child.count -= 1
                at += len(child.label)
                node = child


def _hang_rest(upper: _Node, lower: _Node) -> None:
    """Make `lower`, less its first token, the only child of `upper`."""
    del lower.label[0]
    first = lower.label[0]
    upper.children = {first: lower}
    upper.ranked = [first] if lower.count > 1 else []


def _count(node: _Node, token: int) -> int:
    child = node.children[token]
    return 1 if isinstance(child, int) else child.count


def _rank_first_repeat(node: _Node, token: int) -> None:
    """Rank a child that is about to be counted twice.

    Behind all that were; but before those counted twice, too, if it was the first of those counted once. That, and
    the like below, is how arctic-inference's lists of siblings come to be ordered.
    """
    ranked = node.ranked
    place = len(ranked)
    if ranked and _count(node, ranked[-1]) == 2:
        first = next(token for token in node.children if _count(node, token) == 1)
        if first == token:
            while place and _count(node, ranked[place - 1]) == 2:
                place -= 1
    ranked.insert(place, token)


def _rank_repeat(node: _Node, token: int, count: int) -> None:
    """Rank a child again that is about to be counted once more than `count`."""
    if count == 1:
        _rank_first_repeat(node, token)
        return
    ranked = node.ranked
    place = ranked.index(token)
    if place == 0:
        return
    above = _count(node, ranked[place - 1])
    if above > count + 1:
        return
    target = place
    while target and _count(node, ranked[target - 1]) == above:
        target -= 1
    del ranked[place]
    ranked.insert(target, token)


def _rank_loss(node: _Node, token: int, count: int) -> None:
    """Rank a child again that is about to be counted once less than `count`."""
    ranked = node.ranked
    place = ranked.index(token)
    del ranked[place]
    if count == 2:
        node.children = {token: node.children[token], **node.children}  # the first of those counted once
        return
    while place < len(ranked) and _count(node, ranked[place]) == count:
        place += 1
    ranked.insert(place, token)
