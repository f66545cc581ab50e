"""Suffix decoding on flat arrays: trees that count runs of tokens, and the replay of a text on two of them.

Plain functions on sequences of numbers, which `suffix_jit` can compile; interpreted they are about fifty times slower.
They are in one file because of the cache of compiled functions (`jit.py`), and import nothing that needs a compiler.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

NONE = -1
END = -1
"""Separator of sequences in the buffer; no token has this id."""

# A cell is a child of a node: another node (a run of tokens seen more than once) or a leaf. A leaf is only the index in
# the buffer where it continues, so that leaves grow with their sequence at no cost. References to cells and slots are
# offsets in `cells` and `slots`. AT is the index in the buffer for a leaf, and the length of the label for a node;
# TOKEN is the first token of either.
PREVIOUS, FOLLOWING, TOKEN, COUNT, SLOT, AT = range(6)
CELL = 6
LEAF, FREE = -1, -2  # in SLOT

# A slot holds the rest of a node: the list of its children, by falling count, and its label. ONCE is the first child
# with a count of 1, SKIPPED the number of tokens removed from the front of the label.
FIRST_CHILD, LAST_CHILD, ONCE, SKIPPED = range(4)
LABEL = 4  # the label starts at LABEL + the value of SKIPPED

# Indexes in `state`.
DEPTH, CELLS, FREE_CELL, SLOTS, FREE_SLOT, ENTRIES, OLDEST, TOKENS, LENGTH, ACTIVE = range(10)
STATE = 10

Numbers = MutableSequence[int]

_SPLIT = 2.0**29 + 1


class Tree(NamedTuple):
    """The arrays of a suffix tree; only the newest of its sequences can grow.

    Parameters
    ----------
    cells, slots
        Nodes and leaves; the root is cell 0 with slot 0.
    keys, cells_by_key
        Hash table from a slot and the first token of a child to the child's cell; its size is a power of two, and a
        key of 0 marks a free entry. The child of a node with one child, as most have, is not in it.
    buffer
        Tokens of all sequences, separated by `END`.
    active
        [m - 1] is the node of the last m tokens of the newest sequence, if they occurred before.
    state
        Depth; first unused cell and head of the list of free cells; the same for slots; entries of the hash table;
        start and end of the used part of the buffer; length of the newest sequence; length of `active`.
    """

    cells: Numbers
    slots: Numbers
    keys: Numbers
    cells_by_key: Numbers
    buffer: Numbers
    active: Numbers
    state: Numbers


def has_room(tree: Tree) -> bool:
    """Return whether there is room to append any token."""
    state, depth = tree.state, tree.state[DEPTH]
    return (
        state[CELLS] + 2 * depth * CELL <= len(tree.cells)
        and state[SLOTS] + 2 * depth * (LABEL + depth) <= len(tree.slots)
        and 2 * (state[ENTRIES] + 2 * depth) <= len(tree.keys)
        and state[TOKENS] + 2 <= len(tree.buffer)
    )


# The hash table: open addressing; removing an entry moves up the entries after it.


def _home(key: int, size: int) -> int:
    mixed = (key >> 32) * 0x9E3779B1 + (key & 0xFFFFFFFF) * 0x5EBCA6B
    return (mixed ^ (mixed >> 17)) & (size - 1)


def _key(slot: int, token: int) -> int:
    return ((slot + 1) << 32) + token


def _find(tree: Tree, slot: int, token: int) -> int:
    """Return the child of the node with `slot` that starts with `token`, or NONE."""
    first = tree.slots[slot + FIRST_CHILD]
    if first == NONE or tree.cells[first + TOKEN] == token:
        return first
    if first == tree.slots[slot + LAST_CHILD]:
        return NONE
    keys, size = tree.keys, len(tree.keys)
    key = _key(slot, token)
    index = _home(key, size)
    while keys[index] != 0:
        if keys[index] == key:
            return tree.cells_by_key[index]
        index = (index + 1) & (size - 1)
    return NONE


def _enter(tree: Tree, slot: int, cell: int) -> None:
    """Add a child to the hash table, or replace the one with the same first token."""
    keys, size = tree.keys, len(tree.keys)
    key = _key(slot, tree.cells[cell + TOKEN])
    index = _home(key, size)
    while keys[index] != 0 and keys[index] != key:
        index = (index + 1) & (size - 1)
    if keys[index] == 0:
        tree.state[ENTRIES] += 1
    keys[index] = key
    tree.cells_by_key[index] = cell


def _remove(tree: Tree, slot: int, cell: int) -> None:
    keys, values, size = tree.keys, tree.cells_by_key, len(tree.keys)
    key = _key(slot, tree.cells[cell + TOKEN])
    index = _home(key, size)
    while keys[index] != key:
        index = (index + 1) & (size - 1)
    tree.state[ENTRIES] -= 1
    hole = index
    index = (index + 1) & (size - 1)
    while keys[index] != 0:
        # An entry moves into the hole unless its home lies behind the hole.
        if ((index - _home(keys[index], size)) & (size - 1)) >= ((index - hole) & (size - 1)):
            keys[hole], values[hole] = keys[index], values[index]
            hole = index
        index = (index + 1) & (size - 1)
    keys[hole] = 0


def rehash(keys: Sequence[int], cells_by_key: Sequence[int], larger: Tree) -> None:
    """Copy the entries of a hash table into the empty table of `larger`."""
    to, size = larger.keys, len(larger.keys)
    for old in range(len(keys)):
        if keys[old] != 0:
            index = _home(keys[old], size)
            while to[index] != 0:
                index = (index + 1) & (size - 1)
            to[index] = keys[old]
            larger.cells_by_key[index] = cells_by_key[old]


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
    slots[slot + SKIPPED] = 0
    slots[slot + LABEL] = token
    return slot


def _free_slot(tree: Tree, slot: int) -> None:
    tree.slots[slot] = tree.state[FREE_SLOT]
    tree.state[FREE_SLOT] = slot


def _set_only_child(tree: Tree, slot: int, cell: int) -> None:
    """Make a cell the only child in the list of `slot`."""
    slots, cells = tree.slots, tree.cells
    cells[cell + PREVIOUS] = cells[cell + FOLLOWING] = NONE
    slots[slot + FIRST_CHILD] = slots[slot + LAST_CHILD] = cell
    slots[slot + ONCE] = cell if cells[cell + COUNT] == 1 else NONE


def _unlink(tree: Tree, slot: int, cell: int) -> None:
    """Remove a cell from the list of `slot`."""
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


def _link_after(tree: Tree, slot: int, before: int, cell: int) -> None:
    """Insert a cell into the list of `slot` after the cell `before`; NONE for the start of the list."""
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
    """Append a child with a count of 1."""
    slots = tree.slots
    first, last = slots[slot + FIRST_CHILD], slots[slot + LAST_CHILD]
    if first != NONE:
        if first == last:
            _enter(tree, slot, first)
        _enter(tree, slot, cell)
    _link_after(tree, slot, last, cell)
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
    """Put `new`, which has the same first token, in the position of `old`."""
    slots = tree.slots
    if slots[slot + FIRST_CHILD] != slots[slot + LAST_CHILD]:
        _enter(tree, slot, new)
    once, before = slots[slot + ONCE], tree.cells[old + PREVIOUS]
    _unlink(tree, slot, old)
    _link_after(tree, slot, before, new)
    if once == old:
        slots[slot + ONCE] = new


# The order of siblings. These functions are called before the count changes.


def _rank_first_repeat(tree: Tree, slot: int, cell: int) -> None:
    """Move a child whose count rises from 1 to 2.

    It goes after the children with a count of 2 or more; if it is the first with a count of 1, before those with a
    count of 2. This and the following functions reproduce the order of siblings in arctic-inference.
    """
    slots, cells = tree.slots, tree.cells
    once = slots[slot + ONCE]
    before = cells[once + PREVIOUS]
    if once == cell:
        while before != NONE and cells[before + COUNT] == 2:
            before = cells[before + PREVIOUS]
    _unlink(tree, slot, cell)
    _link_after(tree, slot, before, cell)


def _rank_repeat(tree: Tree, slot: int, cell: int) -> None:
    """Move a child whose count rises by 1."""
    cells = tree.cells
    count = cells[cell + COUNT]
    if count == 1:
        _rank_first_repeat(tree, slot, cell)
        return
    before = cells[cell + PREVIOUS]
    if before == NONE:
        return
    above = cells[before + COUNT]
    if above > count + 1:
        return
    while before != NONE and cells[before + COUNT] == above:
        before = cells[before + PREVIOUS]
    _unlink(tree, slot, cell)
    _link_after(tree, slot, before, cell)


def _rank_loss(tree: Tree, slot: int, cell: int) -> None:
    """Move a child whose count falls by 1, to 1 or more."""
    cells = tree.cells
    count = cells[cell + COUNT]
    last, after = cell, cells[cell + FOLLOWING]
    while after != NONE and cells[after + COUNT] == count:
        last, after = after, cells[after + FOLLOWING]
    if last != cell:
        _unlink(tree, slot, cell)
        _link_after(tree, slot, last, cell)
    if count == 2:
        tree.slots[slot + ONCE] = cell


# Appending tokens.


def begin(tree: Tree) -> None:
    """Begin a new sequence."""
    state = tree.state
    if state[TOKENS] > state[OLDEST] and tree.buffer[state[TOKENS] - 1] != END:
        tree.buffer[state[TOKENS]] = END
        state[TOKENS] += 1
    state[LENGTH] = state[ACTIVE] = 0


def append(tree: Tree, token: int) -> None:
    """Append a token to the newest sequence; the tree must have room."""
    state, active = tree.state, tree.active
    tree.buffer[state[TOKENS]] = token
    state[TOKENS] += 1
    state[LENGTH] += 1
    extended = 0
    length = min(state[ACTIVE], state[DEPTH] - 1)
    while length >= 0:  # longest first, since the leaves have already grown
        node = _step(tree, active[length - 1] if length > 0 else 0, token, length)
        if node != NONE:
            active[length] = node
            extended = max(extended, length + 1)
        length -= 1
    state[ACTIVE] = extended


def _step(tree: Tree, node: int, token: int, length: int) -> int:
    """Return the node that follows `node`, `length` tokens deep, after `token`; NONE if this run is new."""
    cells = tree.cells
    slot = cells[node + SLOT]
    child = _find(tree, slot, token)
    if child == NONE:
        _add_child(tree, slot, _new_cell(tree, token, 1, LEAF, tree.state[TOKENS] - 1))
        return NONE
    if cells[child + SLOT] == LEAF:
        return _step_into_leaf(tree, node, child, token, length)
    if length > 0 and cells[node + COUNT] == cells[child + COUNT] + 1:
        # All other runs through this node continue with this token: extend its label instead of adding a child.
        _grow_label(tree, node, token)
        if cells[child + AT] == 1:
            _absorb(tree, node, child)
        else:
            _shorten(tree, child)
        return node
    if length > 0:
        _rank_repeat(tree, slot, child)
    if cells[child + AT] > 1:
        upper = _new_cell(tree, token, cells[child + COUNT], _new_slot(tree, token), 1)
        _replace_child(tree, slot, child, upper)
        _shorten(tree, child)
        _set_only_child(tree, cells[upper + SLOT], child)
        child = upper
    cells[child + COUNT] += 1
    return child


def _step_into_leaf(tree: Tree, node: int, leaf: int, token: int, length: int) -> int:
    """Return the node that follows `node` after `token` at a leaf, whose count rises to 2."""
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
        _set_only_child(tree, repeated, _new_cell(tree, tree.buffer[onward], 1, LEAF, onward))
    return leaf


def _grow_label(tree: Tree, node: int, token: int) -> None:
    slot, length = tree.cells[node + SLOT], tree.cells[node + AT]
    tree.slots[slot + LABEL + tree.slots[slot + SKIPPED] + length] = token
    tree.cells[node + AT] = length + 1


def _absorb(tree: Tree, node: int, child: int) -> None:
    """Merge a node with its only child, whose label it already includes."""
    cells, slots = tree.cells, tree.slots
    old, slot = cells[node + SLOT], cells[child + SLOT]
    begins = slots[old + SKIPPED]
    for index in range(cells[node + AT]):
        slots[slot + LABEL + index] = slots[old + LABEL + begins + index]
    slots[slot + SKIPPED] = 0
    cells[node + SLOT] = slot
    _free_slot(tree, old)
    _free_cell(tree, child)


def _shorten(tree: Tree, child: int) -> None:
    """Remove the first token from the label of an only child."""
    cells, slots = tree.cells, tree.slots
    slot = cells[child + SLOT]
    slots[slot + SKIPPED] += 1
    cells[child + AT] -= 1
    cells[child + TOKEN] = slots[slot + LABEL + slots[slot + SKIPPED]]


# Removing sequences.


def forget_oldest(tree: Tree, length: int) -> None:
    """Remove the oldest sequence, which has `length` tokens; only allowed before a new one begins."""
    state = tree.state
    first = state[OLDEST]
    _subtract(tree, first, first + length)
    state[OLDEST] = min(first + length + 1, state[TOKENS])
    state[ACTIVE] = 0


def forget_newest(tree: Tree) -> None:
    """Remove the newest sequence."""
    state = tree.state
    first = state[TOKENS] - state[LENGTH]
    _subtract(tree, first, state[TOKENS])
    state[TOKENS] = first
    state[LENGTH] = state[ACTIVE] = 0


def _subtract(tree: Tree, first: int, end: int) -> None:
    """Subtract the counts of the sequence from `first` to `end` of the buffer."""
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
    """Free a cell with a count of 1 and its descendants, each of which has at most one child."""
    while cell != NONE:
        slot, below = tree.cells[cell + SLOT], NONE
        if slot != LEAF:
            below = tree.slots[slot + FIRST_CHILD]
            _free_slot(tree, slot)
        _free_cell(tree, cell)
        cell = below


def rebase(tree: Tree) -> None:
    """Move the used part of the buffer to its start."""
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
    """Round to single precision (Veltkamp), as arctic-inference computes, so that near ties have the same winner."""
    high = number * _SPLIT
    return high - (high - number)


def _matching(tree: Tree, run: int, text: Sequence[int], at: int, count: int) -> int:
    """Return the length of the common prefix of the buffer from `run` and the text from `at`, at most `count`."""
    agreed = 0
    while agreed < count and at + agreed < len(text) and tree.buffer[run + agreed] == text[at + agreed]:
        agreed += 1
    return agreed


def _matching_label(tree: Tree, slot: int, offset: int, text: Sequence[int], at: int, count: int) -> int:
    """Return the length of the common prefix of a label from `offset` and the text from `at`, at most `count`."""
    agreed, label = 0, slot + LABEL + tree.slots[slot + SKIPPED] + offset
    while agreed < count and at + agreed < len(text) and tree.slots[label + agreed] == text[at + agreed]:
        agreed += 1
    return agreed


def _leaf_length(tree: Tree, position: int, limit: int) -> int:
    """Return the number of tokens of a leaf from `position` of the buffer, at most `limit`."""
    length = 0
    limit = min(limit, tree.state[TOKENS] - position)
    while length < limit and tree.buffer[position + length] != END:
        length += 1
    return length


def _follow(
    tree: Tree, cell: int, offset: int, length: int, limit: int, min_prob: float, text: Sequence[int], known: int
) -> tuple[float, int, int]:
    """Follow the most frequent continuation from an offset in a cell, `length` tokens deep.

    Returns
    -------
    tuple
        Score of the path as a draft, its number of tokens, and how many of them equal the text from `known`.
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
            score += more  # exact, since the score is still a whole number
        else:
            for _ in range(more):
                score = _single(score + prob)
        if inner == LEAF:
            break
        cell, slot = child, inner
    return score, tokens, agreed


def _locate(tree: Tree, text: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Return the cell of the text from `start` to `end`, and the offset in its run; NONE if there is no such run."""
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
    tree: Tree,
    text: Sequence[int],
    known: int,
    longest: int,
    max_tokens: int,
    factor: float,
    min_prob: float,
    reach: bool,
) -> tuple[float, int, int, int]:
    """Return the best draft for the continuation of the newest sequence.

    The draft for a match of the last m tokens has up to m * factor tokens, each the most frequent continuation, while
    their joint probability is at least `min_prob`. Its score is the sum of these probabilities. The draft with the
    highest score wins, and among equals the one with the longest match.

    Parameters
    ----------
    text, known
        The whole text, and the number of tokens before the draft.
    longest
        Maximum length of a match.
    max_tokens
        Maximum tokens of the draft.
    reach
        Whether a match may start before the newest sequence.

    Returns
    -------
    tuple
        Score, length of the match, tokens drafted, and how many of them are accepted.
    """
    depth = tree.state[DEPTH]
    matches = min(tree.state[ACTIVE], longest)
    best_score, best_length, best_tokens, best_agreed = 0.0, 0, 0, 0
    # A score is at most the length of its draft, which grows with the match until both fill the depth, then shrinks.
    # Search from this peak in both directions, and stop when no draft can win.
    lower = matches
    while lower > 1 and depth - lower < min(max_tokens, int(lower * factor + 1e-6)):
        lower -= 1
    upper = lower + 1
    while lower >= 1 or upper <= matches:
        below = min(max_tokens, int(lower * factor + 1e-6), depth - lower) if lower >= 1 else -1
        above = min(max_tokens, int(upper * factor + 1e-6), depth - upper) if upper <= matches else -1
        if max(below, above) < best_score:
            break
        length = lower if below > above else upper
        if below > above:
            lower -= 1
        else:
            upper += 1
        cell = tree.active[length - 1]
        limit = min(max_tokens, int(length * factor + 1e-6))
        score, tokens, agreed = _follow(tree, cell, tree.cells[cell + AT], length, limit, min_prob, text, known)
        if score > best_score or (score == best_score and length > best_length and tokens > 0):
            best_score, best_length, best_tokens, best_agreed = score, length, tokens, agreed
    if reach and matches == tree.state[LENGTH]:
        for length in range(matches + 1, longest + 1):
            cell, offset = _locate(tree, text, known - length, known)
            if cell == NONE:
                break
            limit = min(max_tokens, int(length * factor + 1e-6))
            score, tokens, agreed = _follow(tree, cell, offset, length, limit, min_prob, text, known)
            if score > best_score or (score == best_score and length > best_length and tokens > 0):
                best_score, best_length, best_tokens, best_agreed = score, length, tokens, agreed
    return best_score, best_length, best_tokens, best_agreed


def replay(  # noqa: PLR0917 -- compiled functions take positional arguments
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
    """Replay the tokens of a text from `since`, which are not in the trees yet.

    Parameters
    ----------
    local, shared
        The request's own tree, and the tree of earlier answers, to which the answer is appended if `remember` is set.
    text, prompt_tokens
        Prompt and answer, and the index at which the answer starts.
    emitted, drafted
        Output arrays for the steps, shape (answer tokens,).

    Returns
    -------
    int
        Index at which a tree has no more room; the length of the text at the end.
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
        max_tokens = min(num_speculative_tokens, max_model_len - known - 1)
        local_score, _, tokens, agreed = _draft(local, text, known, longest, max_tokens, factor, min_prob, False)
        # The shared tree holds this answer but not its prompt: only earlier answers match across the answer's start.
        reach = position + 1 < longest
        score, _, shared_tokens, shared_agreed = _draft(
            shared, text, known, longest, max_tokens, factor, min_prob, reach
        )
        if score > local_score:
            tokens, agreed = shared_tokens, shared_agreed
        emitted[position + 1] = 1 + min(agreed, len(text) - known - 1)
        drafted[position + 1] = tokens
    return len(text)
