"""The KV cache.

A request holds private blocks, of which only the number matters, and shared ones, identified by hash, with a count of
users. A shared block without users is free, but reusable until its space is needed. Shared blocks are nodes of a hash
table; those without users are in a list from oldest to newest.
"""

from __future__ import annotations

import numpy as np

from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.engine import draws
from backends.simulator.engine.compiled import compiled
from backends.simulator.engine.state import NONE, FleetState, Record


@compiled
def _home(replica: Record, block: int) -> int:
    """Return the preferred index entry for `block`."""
    return np.int64(draws.mix(np.uint64(block)) & np.uint64(replica.mask))  # type: ignore[return-value] # int() would leave it unsigned


@compiled
def find(state: FleetState, replica: Record, block: int) -> int:
    """Return the index entry that holds `block`, or the empty entry where it belongs."""
    at = _home(replica, block)
    while True:
        node = state.index[replica.index + at]
        if node == NONE or state.nodes[node].hash == block:
            return at
        at = (at + 1) & replica.mask


@compiled
def _unlink(state: FleetState, replica: Record, node: int) -> None:
    before, after = state.nodes[node].before, state.nodes[node].after
    if before == NONE:
        replica.oldest = after
    else:
        state.nodes[before].after = after
    if after == NONE:
        replica.newest = before
    else:
        state.nodes[after].before = before
    replica.remembered -= 1


@compiled
def _forget_oldest(state: FleetState, replica: Record) -> None:
    """Evict the least recently used prefix block."""
    node = replica.oldest
    _unlink(state, replica, node)
    hole = find(state, replica, state.nodes[node].hash)
    state.nodes[node].after = replica.free_node
    replica.free_node = node
    # Linear probing: entries after the hole move up where they may (Knuth, TAOCP 3, 6.4, algorithm R).
    at = hole
    while True:
        at = (at + 1) & replica.mask
        follower = state.index[replica.index + at]
        if follower == NONE:
            break
        home = _home(replica, state.nodes[follower].hash)
        if (at - home) & replica.mask >= (at - hole) & replica.mask:
            state.index[replica.index + hole] = follower
            hole = at
    state.index[replica.index + hole] = NONE


@compiled
def take(state: FleetState, replica: Record, count: int) -> None:
    """Take private blocks, evicting unused prefixes if necessary; the caller checks that enough are free."""
    replica.used += count
    while replica.used + replica.remembered > replica.kv_blocks:
        _forget_oldest(state, replica)


@compiled
def share(state: FleetState, replica: Record, block: int) -> None:
    """Add a user to a block that is in the cache."""
    node = state.index[replica.index + find(state, replica, block)]
    if state.nodes[node].users == 0:
        _unlink(state, replica, node)
        replica.used += 1
    state.nodes[node].users += 1


@compiled
def _release(state: FleetState, replica: Record, block: int) -> None:
    """Remove a user from a shared block."""
    node = state.index[replica.index + find(state, replica, block)]
    state.nodes[node].users -= 1
    if state.nodes[node].users:
        return
    state.nodes[node].before = replica.newest
    state.nodes[node].after = NONE
    if replica.newest == NONE:
        replica.oldest = node
    else:
        state.nodes[replica.newest].after = node
    replica.newest = node
    replica.remembered += 1
    replica.used -= 1


@compiled
def publish(state: FleetState, replica: Record, request: Record) -> None:
    """Share the computed full blocks of a request."""
    full = min(request.computed // BLOCK_TOKENS, request.prefix_blocks)
    for number in range(request.published, full):
        block = state.blocks[request.blocks_at + number]
        at = replica.index + find(state, replica, block)
        node = state.index[at]
        if node == NONE:
            node = replica.free_node
            replica.free_node = state.nodes[node].after
            state.nodes[node].hash = block
            state.index[at] = node
        elif state.nodes[node].users:
            continue  # another shared block holds the same tokens
        else:
            _unlink(state, replica, node)  # the block in use replaces an unused one with the same tokens
        state.nodes[node].users = 1
        state.blocks[request.blocks_at + request.prefix_blocks + number] = 1
        request.shared += 1
    request.published = max(request.published, full)


@compiled
def held(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS


@compiled
def leave(state: FleetState, replica: Record, request: Record) -> None:
    """Free the blocks of a request."""
    if request.prefix_blocks and replica.prefix_caching:
        publish(state, replica, request)
    replica.used -= request.blocks - request.shared
    if request.shared:
        # Release the end of a chain first, so that it is evicted first: it is useless without the rest.
        flags = request.blocks_at + request.prefix_blocks
        for number in range(request.prefix_blocks - 1, -1, -1):
            if state.blocks[flags + number]:
                state.blocks[flags + number] = 0
                _release(state, replica, state.blocks[request.blocks_at + number])
        request.shared = 0
