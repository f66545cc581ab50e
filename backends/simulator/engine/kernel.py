"""Continuous batching by the rules of vLLM's scheduler, for many replicas at once, compiled.

All compiled code is in this one file because numba caches compiled code per file: a change of another file would go
unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.engine.state import DRAWN, EXCLUDED, NONE, Floats, Record, Records, State

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Return a function that is compiled at its first call and cached on disk.

    The cache lies beside the source or in the user's cache folder; if neither is writable, each process compiles again.
    """
    try:
        return cast(_F, numba.njit(cache=True)(function))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return cast(_F, numba.njit(function))


# Random draws. They are numbered, not taken in turn: draw n of a request is the same whenever it is made.


@compiled
def _mix(bits: np.uint64) -> np.uint64:
    """Return the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014; constants of Stafford's variant 13)."""
    bits = (bits ^ (bits >> _S30)) * _MIX_1
    bits = (bits ^ (bits >> _S27)) * _MIX_2
    return bits ^ (bits >> _S31)


@compiled
def _uniform(key: np.uint64, number: int) -> float:
    """Return draw `number` of the stream `key`, uniform in [0, 1)."""
    return float(_mix(key + np.uint64(number + 1) * _GOLDEN) >> _S11) * 2.0**-53


@compiled
def _request_key(seed: int, request_id: int) -> np.uint64:
    """Return the key of a request's stream of draws."""
    return _mix(_mix(np.uint64(seed) * _GOLDEN) + np.uint64(request_id) * _GOLDEN)


@compiled
def _request_odds(key: np.uint64, spread: float) -> float:
    """Return the log-normal factor on a request's odds of acceptance, by the Box-Muller transform."""
    if spread == 0.0:
        return 1.0
    normal = math.sqrt(-2.0 * math.log(1.0 - _uniform(key, 0))) * math.cos(2.0 * math.pi * _uniform(key, 1))
    return math.exp(spread * normal)


@compiled
def _reached(key: np.uint64, odds: float, shares: Floats, position: int, limit: int) -> int:
    """Return how many draft positions one draw reaches, at most `limit`, given the share of steps that reach each."""
    drawn = _uniform(key, 2 * position + 1)
    count = 0
    # drawn < s', where s' is s with its odds multiplied; written without the division
    while count < limit and drawn * (1.0 - shares[count] + shares[count] * odds) < shares[count] * odds:
        count += 1
    return count


@compiled
def _shift(profiles: Records, progress: Floats, profile: int, position: int) -> float:
    """Return the shift of logits at an output position: linear between the profile's knots, constant beyond them."""
    knots = profiles[profile].knots
    knot_at, shifts = progress[profile, 0], progress[profile, 1]
    if position <= knot_at[0]:
        return float(shifts[0])
    for knot in range(1, knots):
        if position <= knot_at[knot]:
            slope = (shifts[knot] - shifts[knot - 1]) / (knot_at[knot] - knot_at[knot - 1])
            return float(shifts[knot - 1] + slope * (position - knot_at[knot - 1]))
    return float(shifts[knots - 1])


@compiled
def _drafts(
    profiles: Records, drafted: Floats, profile: int, key: np.uint64, odds: float, position: int, limit: int
) -> int:
    """Return the number of tokens drafted by a step that starts at an output position, at most `limit`."""
    if profiles[profile].always:
        return limit
    return _reached(key, odds, drafted[profile], position, limit)


@compiled
def _accepted(
    profiles: Records,
    accepted: Floats,
    progress: Floats,
    profile: int,
    key: np.uint64,
    odds: float,
    position: int,
    limit: int,
) -> int:
    """Return how many draft tokens of a step that starts at an output position are accepted.

    With n-gram and suffix drafting the long drafts are the accepted ones, so one draw decides both. With a draft model
    each output token has its own hardness, as in `model_based_replay`.
    """
    if not profiles[profile].always:
        return _reached(key, odds, accepted[profile], position, limit)
    if profiles[profile].knots:
        odds *= math.exp(_shift(profiles, progress, profile, position))
    factor = profiles[profile].factor
    count = 0
    while count < limit:
        rate = accepted[profile, count]
        if not _uniform(key, 2 * (position + count)) * (1.0 - rate + rate * odds) < rate * odds * factor:
            break
        count += 1
    return count


@compiled
def draw_script(
    state: State,
    seed: int,
    request_id: int,
    profile: int,
    k: int,
    emitted: npt.NDArray[np.int32],
    drafted: npt.NDArray[np.int32],
) -> None:
    """Fill `emitted` and `drafted` with everything that a request would draw."""
    profiles, progress = state.profiles, state.progress
    key = _request_key(seed, request_id)
    odds = _request_odds(key, profiles[profile].spread)
    emitted[0], drafted[0] = 1, 0
    for position in range(1, len(emitted)):
        count = _drafts(profiles, state.drafted, profile, key, odds, position, k)
        accepted = _accepted(profiles, state.accepted, progress, profile, key, odds, position, count)
        drafted[position] = count
        emitted[position] = min(accepted + 1, len(emitted) - position)


@compiled
def _count_drawn(
    profiles: Records,
    drafted: Floats,
    accepted: Floats,
    progress: Floats,
    profile: int,
    key: np.uint64,
    k: int,
    output: int,
) -> int:
    """Return how many steps a request would take if it drew them, including that of its prefill."""
    if k == 0:
        return output
    odds = _request_odds(key, profiles[profile].spread)
    position = steps = 1
    while position < output:
        count = _drafts(profiles, drafted, profile, key, odds, position, k)
        position += 1 + _accepted(profiles, accepted, progress, profile, key, odds, position, count)
        steps += 1
    return steps


# The KV cache. A request holds private blocks, of which only the number matters, and shared ones, identified by hash
# and counted by users. A shared block without users is free, but stays reusable until its space is needed. Shared
# blocks are nodes of a hash table; those without users are in a list from oldest to newest.


@compiled
def _home(replica: Record, block: int) -> int:
    """Return the preferred index entry of `block`."""
    return np.int64(_mix(np.uint64(block)) & np.uint64(replica.mask))  # type: ignore[return-value] # int() would leave it unsigned


@compiled
def _find(state: State, replica: Record, block: int) -> int:
    """Return the index entry that holds `block`, or the empty entry where it would go."""
    at = _home(replica, block)
    while True:
        node = state.index[replica.index + at]
        if node == NONE or state.nodes[node].hash == block:
            return at
        at = (at + 1) & replica.mask


@compiled
def _unlink(state: State, replica: Record, node: int) -> None:
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
def _forget_oldest(state: State, replica: Record) -> None:
    """Evict the least recently used prefix block."""
    node = replica.oldest
    _unlink(state, replica, node)
    hole = _find(state, replica, state.nodes[node].hash)
    state.nodes[node].after = replica.free_node
    replica.free_node = node
    # Linear probing: the entries after the hole move up where they may (Knuth, TAOCP 3, 6.4, algorithm R).
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
def _take(state: State, replica: Record, count: int) -> None:
    """Take private blocks, evicting unused prefixes if necessary; the caller has checked that they are free."""
    replica.used += count
    while replica.used + replica.remembered > replica.kv_blocks:
        _forget_oldest(state, replica)


@compiled
def _share(state: State, replica: Record, block: int) -> None:
    """Add a user to a block that is in the cache."""
    node = state.index[replica.index + _find(state, replica, block)]
    if state.nodes[node].users == 0:
        _unlink(state, replica, node)
        replica.used += 1
    state.nodes[node].users += 1


@compiled
def _release(state: State, replica: Record, block: int) -> None:
    """Remove a user from a shared block."""
    node = state.index[replica.index + _find(state, replica, block)]
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
def _publish(state: State, replica: Record, request: Record) -> None:
    """Share the computed full blocks of a request."""
    full = min(request.computed // BLOCK_TOKENS, request.prefix_blocks)
    for number in range(request.published, full):
        block = state.blocks[request.blocks_at + number]
        at = replica.index + _find(state, replica, block)
        node = state.index[at]
        if node == NONE:
            node = replica.free_node
            replica.free_node = state.nodes[node].after
            state.nodes[node].hash = block
            state.index[at] = node
        elif state.nodes[node].users:
            continue  # another shared block holds the same tokens
        else:
            _unlink(state, replica, node)  # an unused block with the same tokens is replaced by the one in use
        state.nodes[node].users = 1
        state.blocks[request.blocks_at + request.prefix_blocks + number] = 1
        request.shared += 1
    request.published = max(request.published, full)


# One iteration.


@compiled
def _held(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens."""
    return (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS


@compiled
def _leave(state: State, replica: Record, request: Record) -> None:
    """Free the blocks of a request."""
    if request.prefix_blocks and replica.prefix_caching:
        _publish(state, replica, request)
    replica.used -= request.blocks - request.shared
    if request.shared:
        # The end of a chain is released first, and so evicted first: it is useless without the rest.
        flags = request.blocks_at + request.prefix_blocks
        for number in range(request.prefix_blocks - 1, -1, -1):
            if state.blocks[flags + number]:
                state.blocks[flags + number] = 0
                _release(state, replica, state.blocks[request.blocks_at + number])
        request.shared = 0


@compiled
def _admit(state: State, replica: Record, batch: npt.NDArray[np.int32], budget: int) -> None:
    """Admit from the queue in order of arrival while requests, tokens and blocks allow."""
    while replica.waiting and budget > 0 and replica.running < replica.max_num_seqs:
        slot = replica.first
        request = state.requests[slot]
        length = request.prompt + request.sent
        known = unused = 0
        if replica.prefix_caching:
            # The last token is always computed, because its logits give the first output token.
            limit = min((length - 1) // BLOCK_TOKENS, request.prefix_blocks)
            while known < limit:
                node = state.index[replica.index + _find(state, replica, state.blocks[request.blocks_at + known])]
                if node == NONE:
                    break
                unused += state.nodes[node].users == 0
                known += 1
        cached = known * BLOCK_TOKENS
        tokens = min(length - cached, budget)
        private = _held(cached + tokens) - known
        if private + unused > replica.kv_blocks - replica.used:
            break
        for number in range(known):
            _share(state, replica, state.blocks[request.blocks_at + number])
            state.blocks[request.blocks_at + request.prefix_blocks + number] = 1
        _take(state, replica, private)
        replica.first = request.following
        if replica.first == NONE:
            replica.last = NONE
        replica.waiting -= 1
        request.shared = known
        request.published = known
        request.computed = cached
        request.blocks = known + private
        request.granted = tokens
        if not request.looked_up:
            request.looked_up = 1
            request.cached = cached
            replica.prefix_queries += length
            replica.prefix_hits += cached
            replica.prompt_tokens += length
        batch[replica.running] = slot
        replica.running += 1
        budget -= tokens


@compiled
def _confidence(state: State, request: Record, position: int, chance: float, accepted: int) -> float:
    """Return the engine's confidence that a draft token is accepted if those before it are.

    The engine knows the token's hardness to within a window; see `Acceptance.confidence_window`.
    """
    window = state.profiles[request.profile].window
    if window == 0.0:
        return chance
    number = 2 * (request.sent + position)
    hardness = _uniform(request.key, number)
    if position < accepted:
        hardness *= chance
    elif position == accepted:
        hardness = chance + hardness * (1.0 - chance)
    phase = _uniform(request.key, number + 1)
    low = (math.floor(hardness / window + phase) - phase) * window
    high = min(1.0, low + window)
    low = max(0.0, low)
    if chance <= low:
        return 0.0
    return float(min(1.0, (chance - low) / (high - low)))


@compiled
def _chance(state: State, request: Record, position: int, odds: float) -> float:
    """Return the probability that the draft token at a position is accepted if those before it are."""
    rate = state.accepted[request.profile, position]
    return float(rate * odds * state.profiles[request.profile].factor / (1.0 - rate + rate * odds))


@compiled
def _profiled_s(replica: Record, tokens: int) -> float:
    """Return the seconds in which the engine expects to verify `tokens`, measured at its start on dummy requests."""
    below = min(tokens, replica.knee_tokens)
    requests = min(tokens, replica.max_num_seqs)
    expected_s = (
        replica.base_s
        + replica.per_token_below_knee_s * below
        + replica.per_token_above_knee_s * (tokens - below)
        + (replica.per_request_s + replica.per_context_token_s * replica.profiled_context) * requests
    )
    if replica.graph_tokens and tokens > replica.graph_tokens:
        expected_s += replica.no_graph_s
    return float(expected_s)


@compiled
def _rank_drafts(
    state: State, replica: Record, batch: npt.NDArray[np.int32], survival: Floats, ranked: Floats
) -> tuple[int, int, int]:
    """Fill in how probably each draft token survives, by request, shape (running, k), and of all, descending."""
    count = tokens = emitting = 0
    for column in range(replica.running):
        request = state.requests[batch[column]]
        rest = request.prompt + request.sent - request.computed
        request.verified = 0
        scheduled = max(0, request.granted - rest)
        tokens += request.granted - scheduled
        if not request.granted:
            continue
        emitting += request.granted >= rest
        accepted, odds = NONE, request.odds
        if request.steps_at != NONE:
            accepted, odds = state.steps[request.steps_at + request.sent] - 1, 1.0
        if scheduled and state.profiles[request.profile].knots:
            odds *= math.exp(_shift(state.profiles, state.progress, request.profile, request.sent))
        survives = 1.0
        for position in range(scheduled):
            survives *= _confidence(state, request, position, _chance(state, request, position, odds), accepted)
            survival[column, position] = survives
            ranked[count] = -survives
            count += 1
    ranked[:count].sort()
    for place in range(count):
        ranked[place] *= -1.0
    return count, tokens, emitting


@compiled
def _choose_verified(state: State, replica: Record, batch: npt.NDArray[np.int32]) -> None:
    """Choose how many draft tokens of each request are verified, as vLLM's adaptive verification does.

    Draft tokens are ranked by the probability that they survive. Of those in front, as many are verified as give the
    most expected tokens per second of the step.
    """
    survival, ranked = np.zeros((replica.running, replica.k)), np.empty(replica.running * replica.k)
    count, tokens, emitting = _rank_drafts(state, replica, batch, survival, ranked)
    passes = 1 if replica.parallel else replica.k
    draft_s = replica.draft_base_s + passes * (replica.draft_per_pass_s + replica.draft_per_request_s * replica.running)
    expected, budget = float(emitting), 0
    most = expected / (draft_s + _profiled_s(replica, tokens))
    for admitted in range(1, count + 1):
        expected += ranked[admitted - 1]
        per_second = expected / (draft_s + _profiled_s(replica, tokens + admitted))
        if per_second > most:
            most, budget = per_second, admitted
    if not budget:
        return
    least = ranked[budget - 1]
    equal = budget - np.sum(ranked[:budget] > least)  # how many that survive as probably as the last one still fit
    for column in range(replica.running):
        request = state.requests[batch[column]]
        scheduled = request.granted - (request.prompt + request.sent - request.computed)
        while request.verified < scheduled:
            survives = survival[column, request.verified]
            if survives < least or (survives == least and not equal):
                break
            equal -= survives == least
            request.verified += 1


@compiled
def _step(state: State, number: int, ended: int) -> int:  # noqa: PLR0912, PLR0915 -- one pass over the batch
    """Schedule and run one iteration if there is anything to run; return the number of used entries of `finished`."""
    replica = state.replicas[number]
    batch = state.batches[number]
    profiles = state.profiles
    stay = 0
    for column in range(replica.running):
        request = state.requests[batch[column]]
        if request.sent < request.output:
            batch[stay] = batch[column]
            stay += 1
        else:
            _leave(state, replica, request)
            replica.tokens_in_flight -= request.prompt + request.output
            request.ended_s = replica.now_s
            state.finished[ended] = batch[column]
            ended += 1
    replica.finished += replica.running - stay
    replica.running = stay

    k = replica.drafted_k

    # Grant tokens to the requests in the batch, oldest first; preempt the newest ones if blocks run out.
    budget = replica.max_num_batched_tokens
    preempted = False
    column = 0
    while column < replica.running:
        request = state.requests[batch[column]]
        rest = request.prompt + request.sent - request.computed
        need = rest
        if k and rest == 1 and request.sent:
            if request.steps_at != NONE:
                need += min(k, state.steps[request.steps_at + request.output + request.sent])
            else:
                need += _drafts(profiles, state.drafted, request.profile, request.key, request.odds, request.sent, k)
        granted = min(need, budget)
        budget -= granted
        request.granted = granted
        more = max(0, _held(request.computed + granted) - request.blocks)
        if more:
            while replica.kv_blocks - replica.used < more and column < replica.running:
                preempted = True
                replica.running -= 1
                slot = batch[replica.running]
                newest = state.requests[slot]
                _leave(state, replica, newest)
                replica.preemptions += 1
                newest.preemptions += 1
                newest.following = replica.first
                replica.first = slot
                if replica.last == NONE:
                    replica.last = slot
                replica.waiting += 1
            if column < replica.running:
                _take(state, replica, more)
                request.blocks += more
        column += 1
    staying = replica.running
    if replica.waiting and not preempted:
        _admit(state, replica, batch, budget)
    if not replica.running:
        return ended
    if replica.adaptive and k:
        _choose_verified(state, replica, batch)

    batch_tokens = context_tokens = scheduled = emitting = firsts = drafted_tokens = 0
    for column in range(replica.running):
        request = state.requests[batch[column]]
        granted = request.granted
        if granted == 0:
            continue
        scheduled += 1
        batch_tokens += granted
        context_tokens += request.computed
        rest = request.prompt + request.sent - request.computed
        if granted < rest:  # still in its prefill
            request.computed += granted
            if request.prefix_blocks and replica.prefix_caching:
                _publish(state, replica, request)
            continue
        emitting += 1
        drafted = granted - rest
        tokens = 1
        if drafted:
            verified = drafted
            if replica.adaptive:
                verified = request.verified
                batch_tokens -= drafted - verified
            if request.steps_at != NONE:
                tokens = min(state.steps[request.steps_at + request.sent], verified + 1)
            else:
                tokens += _accepted(
                    profiles,
                    state.accepted,
                    state.progress,
                    request.profile,
                    request.key,
                    request.odds,
                    request.sent,
                    verified,
                )
                tokens = min(tokens, request.output - request.sent)
            drafted_tokens += drafted
            replica.drafts += 1
            replica.accepted_tokens += tokens - 1
            state.accepted_counts[number, tokens - 1] += 1
            request.drafted += drafted
            request.accepted += tokens - 1
        firsts += request.sent == 0
        # Only the accepted draft tokens stay in the KV cache.
        request.computed += rest - 1 + tokens
        request.sent += tokens
        request.steps += 1
        replica.generation_tokens += tokens
        replica.tokens_in_flight += tokens
        if rest > 1 and request.prefix_blocks and replica.prefix_caching:
            _publish(state, replica, request)

    below = min(batch_tokens, replica.knee_tokens)
    verify_s = (
        replica.base_s
        + replica.per_token_below_knee_s * below
        + replica.per_token_above_knee_s * (batch_tokens - below)
        + replica.per_request_s * emitting
        + replica.per_context_token_s * context_tokens
    )
    if replica.graph_tokens and batch_tokens > replica.graph_tokens:
        verify_s += replica.no_graph_s
    if replica.schedule:
        replica.drafted_k = state.schedules[number, min(scheduled, replica.schedule - 1)]
    passes = max(replica.least_passes, replica.drafted_k)
    drafting_s = 0.0
    if passes and emitting:
        if replica.parallel:
            passes = 1
        drafting_s = (
            replica.draft_base_s
            + replica.draft_verify_share * verify_s
            + passes
            * (
                replica.draft_per_pass_s
                + replica.draft_per_request_s * emitting
                + replica.draft_per_context_token_s * context_tokens
            )
        )
    duration_s = verify_s + replica.overhead_s + drafting_s
    if drafting_s or drafted_tokens:
        duration_s += replica.speculation_overhead_s
    if replica.adaptive and drafted_tokens:
        duration_s += replica.draft_adaptive_s
    replica.now_s += duration_s
    replica.busy_s += duration_s
    replica.steps += 1
    replica.draft_tokens += drafted_tokens
    replica.step_s = duration_s
    replica.batch_tokens = batch_tokens
    replica.context_tokens = context_tokens
    replica.admitted = replica.running - staying
    if firsts:
        for column in range(replica.running):
            request = state.requests[batch[column]]
            if request.steps and request.first_s < 0.0:
                request.first_s = replica.now_s
    return ended


@compiled
def advance(  # noqa: PLR0917 -- passing a tuple of arrays to numba takes four times as long
    until_s: float,
    replicas: Records,
    requests: Records,
    batches: npt.NDArray[np.int32],
    schedules: npt.NDArray[np.int32],
    steps: npt.NDArray[np.int16],
    blocks: npt.NDArray[np.int64],
    nodes: Records,
    index: npt.NDArray[np.int32],
    profiles: Records,
    drafted: Floats,
    accepted: Floats,
    progress: Floats,
    accepted_counts: npt.NDArray[np.int64],
    finished: npt.NDArray[np.int32],
) -> int:
    """Begin every step that starts before `until_s`, given the fields of `State`."""
    state = State(
        replicas,
        requests,
        batches,
        schedules,
        steps,
        blocks,
        nodes,
        index,
        profiles,
        drafted,
        accepted,
        progress,
        accepted_counts,
        finished,
    )
    ended = 0
    for number in range(len(replicas)):
        replica = replicas[number]
        while replica.now_s < until_s and (replica.running or replica.waiting):
            ended = _step(state, number, ended)
    return ended


@compiled
def enqueue(replicas: Records, requests: Records, profiles: Records, slot: int, seed: int) -> None:
    """Append a request, whose id, arrival, lengths, script and blocks are set, to its replica's queue."""
    request = requests[slot]
    request.first_s = -1.0
    request.key = _request_key(seed, request.id)
    request.odds = _request_odds(request.key, profiles[request.profile].spread)
    request.following = NONE
    replica = replicas[request.replica]
    if not replica.running and not replica.waiting:
        replica.now_s = max(replica.now_s, request.arrived_s)
    if replica.last == NONE:
        replica.first = slot
    else:
        requests[replica.last].following = slot
    replica.last = slot
    replica.waiting += 1
    replica.tokens_in_flight += request.prompt


@compiled
def cancel(state: State, request_id: int) -> int:
    """Remove a request from its batch or queue and free its blocks; return its slot, NONE if it is not there."""
    for number in range(len(state.replicas)):
        replica = state.replicas[number]
        batch = state.batches[number]
        for column in range(replica.running):
            slot = batch[column]
            request = state.requests[slot]
            if request.id == request_id:
                _leave(state, replica, request)
                replica.running -= 1
                for later in range(column, replica.running):
                    batch[later] = batch[later + 1]
                replica.tokens_in_flight -= request.prompt + request.sent
                return int(slot)
        before, waiting = NONE, replica.first
        while waiting != NONE:
            request = state.requests[waiting]
            if request.id == request_id:
                if before == NONE:
                    replica.first = request.following
                else:
                    state.requests[before].following = request.following
                if replica.last == waiting:
                    replica.last = before
                replica.waiting -= 1
                replica.tokens_in_flight -= request.prompt + request.sent
                return int(waiting)
            before, waiting = waiting, np.int64(request.following)
    return NONE


# The choice of an oracle.


@compiled
def least_delay(  # noqa: PLR0917 -- see `advance`
    replicas: Records,
    requests: Records,
    batches: npt.NDArray[np.int32],
    profiles: Records,
    drafted: Floats,
    accepted: Floats,
    progress: Floats,
    rows: npt.NDArray[np.int64],
    costs: Floats,
    steps: npt.NDArray[np.int64],
    last_steps: npt.NDArray[np.int64],
    seed: int,
    request_id: int,
    prompt: int,
    output: int,
) -> int:
    """Return the replica with the least delay to the next request and to those in flight; see `Fleet.least_delay`."""
    key = _request_key(seed, request_id)
    context = prompt + output / 2
    best, least_s = 0, np.inf
    for number in range(len(replicas)):
        if steps[number] == EXCLUDED:
            continue
        replica = replicas[number]
        if steps[number] == DRAWN:
            for other in range(number):
                if rows[other] == rows[number] and replicas[other].k == replica.k:
                    steps[number] = steps[other]
                    break
            else:
                steps[number] = _count_drawn(
                    profiles, drafted, accepted, progress, rows[number], key, replica.k, output
                )
        base_s, per_request_s, per_context_token_s, per_prompt_token_s = costs[number]
        count = replica.running + replica.waiting
        own_s = per_request_s + per_context_token_s * context
        delay_s = steps[number] * (base_s + own_s) + per_prompt_token_s * prompt * (1 + count)
        shared_s = 0.0
        slot = replica.first
        for column in range(count):
            if column < replica.running:
                request = requests[batches[number, column]]
            else:
                request = requests[slot]
                slot = request.following
            left = max(1, last_steps[request.id] - replica.steps)
            adds_s = per_request_s + per_context_token_s * (request.prompt + request.output / 2)
            shared_s += (adds_s + own_s) * min(steps[number], left)
        delay_s += shared_s
        if delay_s < least_s:
            best, least_s = number, delay_s
    return best
