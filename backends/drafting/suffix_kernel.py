"""Suffix decoding on flat arrays: trees that count runs of tokens, and the replay of a text on two of them.

Plain functions on sequences of numbers, which `suffix_jit` can compile; interpreted they do the same, some fifty
times slower. They stand in one file because of how the result is cached (`compiled.py`), and import nothing that
needs a compiler.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

NONE = -1
END = -1
"""Between sequences in the buffer; no token has this id."""

# A cell stands for a child of a node: another node (a run of tokens seen more than once) or a leaf. A leaf is just
# the place in the buffer where it goes on, so that leaves grow with their sequence at no cost. Cells are referred to
# by their offset in `cells`, and so are slots.
# AT is of a leaf its place in the buffer, of a node its label's length; TOKEN the first token of either.
PREVIOUS, FOLLOWING, TOKEN, COUNT, SLOT, AT = range(6)
CELL = 6
LEAF, FREE = -1, -2  # in SLOT

# A slot is what a node has beyond its cell: the list of its children, those seen more than once first and the most
# frequent first of them, and its label. ONCE is the first child that was seen but once.
FIRST_CHILD, LAST_CHILD, ONCE, BEGINS = range(4)
LABEL = 4  # the label is from LABEL + BEGINS on

# Numbers of a tree, in `state`.
DEPTH, CELLS, FREE_CELL, SLOTS, FREE_SLOT, ENTRIES, OLDEST, TOKENS, LENGTH, HERE = range(10)
STATE = 10

Numbers = MutableSequence[int]

_SPLIT = 2.0**29 + 1


class Tree(NamedTuple):
    """All runs of up to a depth of tokens in a number of sequences, of which only the newest grows.

    Parameters
    ----------
    cells, slots
        Nodes and leaves; the root is cell 0 with slot 0.
    keys, cells_by_key
        A hash table from a slot and the first token of a child to the child's cell; its length is a power of two.
        A key of 0 is a free place. An only child is not in it: most nodes have but one.
    buffer
        Tokens of all sequences, `END` between them.
    here
        [m - 1]: the node that the last m tokens of the newest sequence lead to, where they were seen before.
    state
        Depth, the first unused cell and slot and the lists of those given back, entries of the table, beginning and
        end of the used part of the buffer, length of the newest sequence, and of `here`.
    """

    cells: Numbers
    slots: Numbers
    keys: Numbers
    cells_by_key: Numbers
    buffer: Numbers
    here: Numbers
    state: Numbers


def has_room(tree: Tree) -> bool:
    """Say whether another token can be appended whatever it is."""
    state, depth = tree.state, tree.state[DEPTH]
    return (
        state[CELLS] + 2 * depth * CELL <= len(tree.cells)
        and state[SLOTS] + 2 * depth * (LABEL + depth) <= len(tree.slots)
        and 2 * (state[ENTRIES] + 2 * depth) <= len(tree.keys)
        and state[TOKENS] + 2 <= len(tree.buffer)
    )


# The hash table: open addressing, with what follows moved up when an entry goes.


def _home(key: int, size: int) -> int:
    mixed = (key >> 32) * 0x9E3779B1 + (key & 0xFFFFFFFF) * 0x5EBCA6B
    return (mixed ^ (mixed >> 17)) & (size - 1)


def _key(slot: int, token: int) -> int:
    return ((slot + 1) << 32) + token


def _find(tree: Tree, slot: int, token: int) -> int:
    """Return the child of the node with `slot` that begins with `token`, or NONE."""
    first = tree.slots[slot + FIRST_CHILD]
    if first == NONE or tree.cells[first + TOKEN] == token:
        return first
    if first == tree.slots[slot + LAST_CHILD]:
        return NONE
    keys, size = tree.keys, len(tree.keys)
    key = _key(slot, token)
    place = _home(key, size)
    while keys[place] != 0:
        if keys[place] == key:
            return tree.cells_by_key[place]
        place = (place + 1) & (size - 1)
    return NONE


def _enter(tree: Tree, slot: int, cell: int) -> None:
    """Enter a child, in place of one with the same first token if there is one."""
    keys, size = tree.keys, len(tree.keys)
    key = _key(slot, tree.cells[cell + TOKEN])
    place = _home(key, size)
    while keys[place] != 0 and keys[place] != key:
        place = (place + 1) & (size - 1)
    if keys[place] == 0:
        tree.state[ENTRIES] += 1
    keys[place] = key
    tree.cells_by_key[place] = cell


def _remove(tree: Tree, slot: int, cell: int) -> None:
    keys, values, size = tree.keys, tree.cells_by_key, len(tree.keys)
    key = _key(slot, tree.cells[cell + TOKEN])
    place = _home(key, size)
    while keys[place] != key:
        place = (place + 1) & (size - 1)
    tree.state[ENTRIES] -= 1
    hole = place
    place = (place + 1) & (size - 1)
    while keys[place] != 0:
        # Moved into the hole unless its home lies behind the hole.
        if ((place - _home(keys[place], size)) & (size - 1)) >= ((place - hole) & (size - 1)):
            keys[hole], values[hole] = keys[place], values[place]
            hole = place
        place = (place + 1) & (size - 1)
    keys[hole] = 0


def rehash(keys: Sequence[int], cells_by_key: Sequence[int], larger: Tree) -> None:
    """Move the entries of a table into the table of `larger`, which is empty."""
    to, size = larger.keys, len(larger.keys)
    for index in range(len(keys)):
        if keys[index] != 0:
            place = _home(keys[index], size)
            while to[place] != 0:
                place = (place + 1) & (size - 1)
            to[place] = keys[index]
            larger.cells_by_key[place] = cells_by_key[index]


# Cells, slots and lists of children.


def _new_cell(tree: Tree, token: int, count: int, slot: int, at: int) -> int:
    cells, state = tree.cells, tree.state
    cell = state[FREE_CELL]
    if cell == NONE:
        cell = state[CELLS]
        state[CELLS] = cell + CELL
    else:
        state[FREE_CELL] = cells[cell + FOLLOWING]
    cells[cell + PREVIOUS] = cells[cell + FOLLOWING] = NONE
    cells[cell + TOKEN], cells[cell + COUNT] = token, count
    cells[cell + SLOT], cells[cell + AT] = slot, at
    return cell


def _free_cell(tree: Tree, cell: int) -> None:
    tree.cells[cell + SLOT] = FREE
    tree.cells[cell + FOLLOWING] = tree.state[FREE_CELL]
    tree.state[FREE_CELL] = cell


def _new_slot(tree: Tree, token: int) -> int:
    """Return the slot of a node without children and with the label `token`."""
    slots, state = tree.slots, tree.state
    slot = state[FREE_SLOT]
    if slot == NONE:
        slot = state[SLOTS]
        state[SLOTS] = slot + LABEL + state[DEPTH]
    else:
        state[FREE_SLOT] = slots[slot]
    slots[slot + FIRST_CHILD] = slots[slot + LAST_CHILD] = slots[slot + ONCE] = NONE
    slots[slot + BEGINS] = 0
    slots[slot + LABEL] = token
    return slot


def _free_slot(tree: Tree, slot: int) -> None:
    tree.slots[slot] = tree.state[FREE_SLOT]
    tree.state[FREE_SLOT] = slot


def _hang_only(tree: Tree, slot: int, cell: int) -> None:
    """Make a cell the only one in the list of `slot`."""
    slots, cells = tree.slots, tree.cells
    cells[cell + PREVIOUS] = cells[cell + FOLLOWING] = NONE
    slots[slot + FIRST_CHILD] = slots[slot + LAST_CHILD] = cell
    slots[slot + ONCE] = cell if cells[cell + COUNT] == 1 else NONE


def _unlink(tree: Tree, slot: int, cell: int) -> None:
    """Take a cell out of the list of `slot`."""
    slots, cells = tree.slots, tree.cells
    before, after = cells[cell + PREVIOUS], cells[cell + FOLLOWING]
    if before == NONE:
        slots[slot + FIRST_CHILD] = after
    else:
        cells[before + FOLLOWING] = after
    if after == NONE:
        slots[slot + LAST_CHILD] = before
    else:
        cells[after + PREVIOUS] = before
    if slots[slot + ONCE] == cell:
        slots[slot + ONCE] = after


def _link_behind(tree: Tree, slot: int, before: int, cell: int) -> None:
    """Put a cell into the list of `slot` behind the cell `before`; NONE for its beginning."""
    slots, cells = tree.slots, tree.cells
    after = slots[slot + FIRST_CHILD] if before == NONE else cells[before + FOLLOWING]
    cells[cell + PREVIOUS], cells[cell + FOLLOWING] = before, after
    if before == NONE:
        slots[slot + FIRST_CHILD] = cell
    else:
        cells[before + FOLLOWING] = cell
    if after == NONE:
        slots[slot + LAST_CHILD] = cell
    else:
        cells[after + PREVIOUS] = cell


def _add_child(tree: Tree, slot: int, cell: int) -> None:
    """Make a cell that was counted once the last child."""
    slots = tree.slots
    first, last = slots[slot + FIRST_CHILD], slots[slot + LAST_CHILD]
    if first != NONE:
        if first == last:
            _enter(tree, slot, first)
        _enter(tree, slot, cell)
    _link_behind(tree, slot, last, cell)
    if slots[slot + ONCE] == NONE:
        slots[slot + ONCE] = cell


def _drop_child(tree: Tree, slot: int, cell: int) -> None:
    slots = tree.slots
    if slots[slot + FIRST_CHILD] == slots[slot + LAST_CHILD]:
        _unlink(tree, slot, cell)
        return
    _remove(tree, slot, cell)
    _unlink(tree, slot, cell)
    if slots[slot + FIRST_CHILD] == slots[slot + LAST_CHILD]:
        _remove(tree, slot, slots[slot + FIRST_CHILD])


def _replace_child(tree: Tree, slot: int, old: int, new: int) -> None:
    """Put `new`, which begins alike, where `old` is."""
    slots = tree.slots
    if slots[slot + FIRST_CHILD] != slots[slot + LAST_CHILD]:
        _enter(tree, slot, new)
    once, before = slots[slot + ONCE], tree.cells[old + PREVIOUS]
    _unlink(tree, slot, old)
    _link_behind(tree, slot, before, new)
    if once == old:
        slots[slot + ONCE] = new


# The order of siblings.


def _rank_first_repeat(tree: Tree, slot: int, cell: int) -> None:
    """Rank a child that is about to be counted twice.

    Behind all that were; but before those counted twice, too, if it was the first of those counted once. That, and
    the like below, is how arctic-inference's lists of siblings come to be ordered.
    """
    slots, cells = tree.slots, tree.cells
    once = slots[slot + ONCE]
    place = cells[once + PREVIOUS]
    if once == cell:
        while place != NONE and cells[place + COUNT] == 2:
            place = cells[place + PREVIOUS]
    _unlink(tree, slot, cell)
    _link_behind(tree, slot, place, cell)


def _rank_repeat(tree: Tree, slot: int, cell: int) -> None:
    """Rank a child that is about to be counted once more."""
    cells = tree.cells
    count = cells[cell + COUNT]
    if count == 1:
        _rank_first_repeat(tree, slot, cell)
        return
    place = cells[cell + PREVIOUS]
    if place == NONE:
        return
    above = cells[place + COUNT]
    if above > count + 1:
        return
    while place != NONE and cells[place + COUNT] == above:
        place = cells[place + PREVIOUS]
    _unlink(tree, slot, cell)
    _link_behind(tree, slot, place, cell)


def _rank_loss(tree: Tree, slot: int, cell: int) -> None:
    """Rank a child that is about to be counted once less, and was counted more than once."""
    cells = tree.cells
    count = cells[cell + COUNT]
    place, after = cell, cells[cell + FOLLOWING]
    while after != NONE and cells[after + COUNT] == count:
        place, after = after, cells[after + FOLLOWING]
    if place != cell:
        _unlink(tree, slot, cell)
        _link_behind(tree, slot, place, cell)
    if count == 2:
        tree.slots[slot + ONCE] = cell


# Growing.


def begin(tree: Tree) -> None:
    """Begin a new sequence."""
    state = tree.state
    if state[TOKENS] > state[OLDEST] and tree.buffer[state[TOKENS] - 1] != END:
        tree.buffer[state[TOKENS]] = END
        state[TOKENS] += 1
    state[LENGTH] = state[HERE] = 0


def append(tree: Tree, token: int) -> None:
    """Let the newest sequence grow by a token; the tree must have room."""
    state, here = tree.state, tree.here
    tree.buffer[state[TOKENS]] = token
    state[TOKENS] += 1
    state[LENGTH] += 1
    moved = 0
    length = min(state[HERE], state[DEPTH] - 1)
    while length >= 0:  # longest first, as leaves have already grown
        node = _step(tree, here[length - 1] if length > 0 else 0, token, length)
        if node != NONE:
            here[length] = node
            moved = max(moved, length + 1)
        length -= 1
    state[HERE] = moved


def _step(tree: Tree, node: int, token: int, length: int) -> int:
    """Move a suffix on by `token` from `node`, `length` tokens deep; NONE where that was never seen before."""
    cells = tree.cells
    slot = cells[node + SLOT]
    child = _find(tree, slot, token)
    if child == NONE:
        _add_child(tree, slot, _new_cell(tree, token, 1, LEAF, tree.state[TOKENS] - 1))
        return NONE
    if cells[child + SLOT] == LEAF:
        return _step_into_leaf(tree, node, child, token, length)
    if length > 0 and cells[node + COUNT] == cells[child + COUNT] + 1:
        # All others that pass this node go this way: it becomes longer instead of getting a child.
        _grow_label(tree, node, token)
        if cells[child + AT] == 1:
            _take_over(tree, node, child)
        else:
            _shorten(tree, child)
        return node
    if length > 0:
        _rank_repeat(tree, slot, child)
    if cells[child + AT] > 1:
        upper = _new_cell(tree, token, cells[child + COUNT], _new_slot(tree, token), 1)
        _replace_child(tree, slot, child, upper)
        _shorten(tree, child)
        _hang_only(tree, cells[upper + SLOT], child)
        child = upper
    cells[child + COUNT] += 1
    return child


def _step_into_leaf(tree: Tree, node: int, leaf: int, token: int, length: int) -> int:
    """Move a suffix on into a leaf, of which at least this token is seen twice then."""
    cells = tree.cells
    slot = cells[node + SLOT]
    onward = cells[leaf + AT] + 1
    ends = length + 1 >= tree.state[DEPTH] or onward >= tree.state[TOKENS] or tree.buffer[onward] == END
    if length > 0 and cells[node + COUNT] == 2:
        _grow_label(tree, node, token)
        if ends:
            _unlink(tree, slot, leaf)
            _free_cell(tree, leaf)
        else:
            cells[leaf + TOKEN], cells[leaf + AT] = tree.buffer[onward], onward
        return node
    if length > 0:
        _rank_first_repeat(tree, slot, leaf)
    repeated = _new_slot(tree, token)
    cells[leaf + COUNT], cells[leaf + SLOT], cells[leaf + AT] = 2, repeated, 1
    if not ends:
        _hang_only(tree, repeated, _new_cell(tree, tree.buffer[onward], 1, LEAF, onward))
    return leaf


def _grow_label(tree: Tree, node: int, token: int) -> None:
    slot, length = tree.cells[node + SLOT], tree.cells[node + AT]
    tree.slots[slot + LABEL + tree.slots[slot + BEGINS] + length] = token
    tree.cells[node + AT] = length + 1


def _take_over(tree: Tree, node: int, child: int) -> None:
    """Give a node the children of its only child, whose label it has taken."""
    cells, slots = tree.cells, tree.slots
    old, slot = cells[node + SLOT], cells[child + SLOT]
    begins = slots[old + BEGINS]
    for index in range(cells[node + AT]):
        slots[slot + LABEL + index] = slots[old + LABEL + begins + index]
    slots[slot + BEGINS] = 0
    cells[node + SLOT] = slot
    _free_slot(tree, old)
    _free_cell(tree, child)


def _shorten(tree: Tree, child: int) -> None:
    """Take the first token of an only child's label."""
    cells, slots = tree.cells, tree.slots
    slot = cells[child + SLOT]
    slots[slot + BEGINS] += 1
    cells[child + AT] -= 1
    cells[child + TOKEN] = slots[slot + LABEL + slots[slot + BEGINS]]


# Forgetting.


def forget_oldest(tree: Tree, length: int) -> None:
    """Forget the oldest sequence, which has `length` tokens; only before a new one begins."""
    state = tree.state
    first = state[OLDEST]
    _subtract(tree, first, first + length)
    state[OLDEST] = min(first + length + 1, state[TOKENS])
    state[HERE] = 0


def forget_newest(tree: Tree) -> None:
    """Forget the newest sequence."""
    state = tree.state
    first = state[TOKENS] - state[LENGTH]
    _subtract(tree, first, state[TOKENS])
    state[TOKENS] = first
    state[LENGTH] = state[HERE] = 0


def _subtract(tree: Tree, first: int, end: int) -> None:
    """Uncount the sequence between two places of the buffer."""
    cells, buffer, depth = tree.cells, tree.buffer, tree.state[DEPTH]
    for start in range(first, end):
        node, at = 0, start
        while at < min(start + depth, end):
            slot = cells[node + SLOT]
            child = _find(tree, slot, buffer[at])
            if cells[child + COUNT] == 1:
                _drop_child(tree, slot, child)
                _free_branch(tree, child)
                break
            if node != 0:
                _rank_loss(tree, slot, child)
            cells[child + COUNT] -= 1
            at += cells[child + AT]
            node = child


def _free_branch(tree: Tree, cell: int) -> None:
    """Give back a cell that was counted once, and what is below it: no node has more than one child there."""
    while cell != NONE:
        slot, below = tree.cells[cell + SLOT], NONE
        if slot != LEAF:
            below = tree.slots[slot + FIRST_CHILD]
            _free_slot(tree, slot)
        _free_cell(tree, cell)
        cell = below


def rebase(tree: Tree) -> None:
    """Move what is used of the buffer to its beginning."""
    cells, state, buffer = tree.cells, tree.state, tree.buffer
    shift = state[OLDEST]
    for index in range(shift, state[TOKENS]):
        buffer[index - shift] = buffer[index]
    state[TOKENS] -= shift
    state[OLDEST] = 0
    for cell in range(0, state[CELLS], CELL):
        if cells[cell + SLOT] == LEAF:
            cells[cell + AT] -= shift


# Drafting.


def _single(number: float) -> float:
    """Round to single precision (Veltkamp): arctic-inference reckons in it, and of near ties the same is to win."""
    high = number * _SPLIT
    return high - (high - number)


def _matching(tree: Tree, run: int, text: Sequence[int], at: int, most: int) -> int:
    """Return how many tokens of the buffer from `run` on, `most` of them, are those of the text from `at` on."""
    agreed = 0
    while agreed < most and at + agreed < len(text) and tree.buffer[run + agreed] == text[at + agreed]:
        agreed += 1
    return agreed


def _matching_label(tree: Tree, slot: int, offset: int, text: Sequence[int], at: int, most: int) -> int:
    """Return how many tokens of a label from `offset` on, `most` of them, are those of the text from `at` on."""
    agreed, label = 0, slot + LABEL + tree.slots[slot + BEGINS] + offset
    while agreed < most and at + agreed < len(text) and tree.slots[label + agreed] == text[at + agreed]:
        agreed += 1
    return agreed


def _leaf_length(tree: Tree, position: int, most: int) -> int:
    """Return how many tokens, `most` at most, a leaf has from a place in the buffer."""
    length = 0
    most = min(most, tree.state[TOKENS] - position)
    while length < most and tree.buffer[position + length] != END:
        length += 1
    return length


def _follow(
    tree: Tree, cell: int, offset: int, length: int, limit: int, min_prob: float, text: Sequence[int], known: int
) -> tuple[float, int, int]:
    """Take the most frequent path from a place `length` tokens deep.

    Returns
    -------
    tuple
        The score of the path as a draft, its tokens, and how many of them, from the first on, are in the text from
        `known` on.
    """
    cells, slots = tree.cells, tree.slots
    slot = cells[cell + SLOT]
    if slot == LEAF:
        run = cells[cell + AT] + offset
        tokens = _leaf_length(tree, run, min(limit, tree.state[DEPTH] - length))
        return float(tokens), tokens, _matching(tree, run, text, known, tokens)
    tokens = min(limit, cells[cell + AT] - offset)
    agreed = _matching_label(tree, slot, offset, text, known, tokens)
    score, prob = float(tokens), 1.0
    while tokens < limit:
        child = slots[slot + FIRST_CHILD]
        if child == NONE:
            break
        prob = _single(prob * _single(cells[child + COUNT] / cells[cell + COUNT]))
        if prob < min_prob:
            break
        inner = cells[child + SLOT]
        if inner == LEAF:
            run = cells[child + AT]
            more = _leaf_length(tree, run, min(limit - tokens, tree.state[DEPTH] - length - tokens))
            if agreed == tokens:
                agreed += _matching(tree, run, text, known + tokens, more)
        else:
            more = min(limit - tokens, cells[child + AT])
            if agreed == tokens:
                agreed += _matching_label(tree, inner, 0, text, known + tokens, more)
        tokens += more
        if prob == 1.0:
            score += more  # exact, as the score is a whole number so far
        else:
            for _ in range(more):
                score = _single(score + prob)
        if inner == LEAF:
            break
        cell, slot = child, inner
    return score, tokens, agreed


def _locate(tree: Tree, text: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Return the cell to which the text from `start` to `end` leads, and how far into its run; NONE where to none."""
    cells, cell, at = tree.cells, 0, start
    while at < end:
        child = _find(tree, cells[cell + SLOT], text[at])
        if child == NONE:
            return NONE, 0
        slot, rest = cells[child + SLOT], end - at
        if slot == LEAF:
            run = cells[child + AT]
            held = _leaf_length(tree, run, min(rest, tree.state[DEPTH] - (at - start)))
            if held < rest or _matching(tree, run, text, at, rest) < rest:
                return NONE, 0
            return child, rest
        held = min(cells[child + AT], rest)
        if _matching_label(tree, slot, 0, text, at, held) < held:
            return NONE, 0
        if held == rest:
            return child, held
        at += held
        cell = child
    return cell, 0


def _draft(
    tree: Tree, text: Sequence[int], known: int, longest: int, most: int, factor: float, min_prob: float, reach: bool
) -> tuple[float, int, int, int]:
    """Find the best draft for what follows the newest sequence.

    The draft after the last m tokens has up to m * factor tokens, each the most frequent continuation, as long as
    their joint probability is at least `min_prob`; its score is the sum of those probabilities. The best score wins,
    and of equal ones the longest match.

    Parameters
    ----------
    text, known
        The whole text, of which `known` tokens are known.
    longest
        Longest match that counts.
    most
        Tokens drafted at most.
    reach
        Whether matches may begin before the newest sequence does.

    Returns
    -------
    tuple
        Score, length of the match, tokens drafted, and how many of them are right.
    """
    depth = tree.state[DEPTH]
    matches = min(tree.state[HERE], longest)
    best_score, best_length, best_tokens, best_agreed = 0.0, 0, 0, 0
    # A score is at most the length of its draft, which first grows with the match and then, where match and draft
    # fill the depth, shrinks. From its peak on both ways, what cannot win is left out.
    lower = matches
    while lower > 1 and depth - lower < min(most, int(lower * factor + 1e-6)):
        lower -= 1
    upper = lower + 1
    while lower >= 1 or upper <= matches:
        below = min(most, int(lower * factor + 1e-6), depth - lower) if lower >= 1 else -1
        above = min(most, int(upper * factor + 1e-6), depth - upper) if upper <= matches else -1
        if max(below, above) < best_score:
            break
        length = lower if below > above else upper
        if below > above:
            lower -= 1
        else:
            upper += 1
        cell = tree.here[length - 1]
        limit = min(most, int(length * factor + 1e-6))
        score, tokens, agreed = _follow(tree, cell, tree.cells[cell + AT], length, limit, min_prob, text, known)
        if score > best_score or (score == best_score and length > best_length and tokens > 0):
            best_score, best_length, best_tokens, best_agreed = score, length, tokens, agreed
    if reach and matches == tree.state[LENGTH]:
        for length in range(matches + 1, longest + 1):
            cell, offset = _locate(tree, text, known - length, known)
            if cell == NONE:
                break
            limit = min(most, int(length * factor + 1e-6))
            score, tokens, agreed = _follow(tree, cell, offset, length, limit, min_prob, text, known)
            if score > best_score or (score == best_score and length > best_length and tokens > 0):
                best_score, best_length, best_tokens, best_agreed = score, length, tokens, agreed
    return best_score, best_length, best_tokens, best_agreed


def replay(  # noqa: PLR0917 -- what is compiled is called by position
    local: Tree,
    shared: Tree,
    text: Sequence[int],
    prompt_tokens: int,
    since: int,
    num_speculative_tokens: int,
    max_model_len: int,
    factor: float,
    min_prob: float,
    remember: bool,
    emitted: Numbers,
    drafted: Numbers,
) -> int:
    """Replay the tokens of a text from `since` on, which were not appended to the trees before.

    Parameters
    ----------
    local, shared
        The request's own tree, and that of the replica's answers (appended to only if `remember`).
    text, prompt_tokens
        Prompt and answer, and where the answer begins.
    emitted, drafted
        Shape (answer tokens,): where the steps are written.

    Returns
    -------
    int
        Where it stopped because a tree has no more room; the length of the text when it is done.
    """
    depth, min_prob = local.state[DEPTH], _single(min_prob)
    for at in range(since, len(text)):
        if not (has_room(local) and has_room(shared)):
            return at
        position = at - prompt_tokens
        if remember and position >= 0:
            append(shared, text[at])
        if at + 1 == len(text):
            break
        append(local, text[at])
        if position < 0:
            continue
        known = at + 1
        longest = min(depth, known) - 1
        most = min(num_speculative_tokens, max_model_len - known - 1)
        own, _, tokens, agreed = _draft(local, text, known, longest, most, factor, min_prob, False)
        # An answer's own tokens are in the shared tree up to its beginning; longer matches reach into the prompt.
        others, _, more, right = _draft(shared, text, known, longest, most, factor, min_prob, position + 1 < longest)
        if others > own:
            tokens, agreed = more, right
        emitted[position + 1] = 1 + min(agreed, len(text) - known - 1)
        drafted[position + 1] = tokens
    return len(text)
