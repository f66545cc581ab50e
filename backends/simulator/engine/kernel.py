"""Continuous batching by the rules of vLLM's scheduler, compiled, for many replicas at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from backends.calibration.batch_schedule import unsplit_reads
from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.engine import blocks, draws
from backends.simulator.engine.compiled import compiled
from backends.simulator.engine.state import NONE, FleetState, Record, Records
from backends.simulator.engine.verification import choose_verified, tokens_s

_unsplit_reads = compiled(unsplit_reads)


@compiled
def _admit(state: FleetState, replica: Record, batch: npt.NDArray[np.int32], budget: int) -> None:
    """Admit from the queue by priority and arrival while requests, tokens and blocks allow.

    An asynchronous scheduler decided on this step when the previous one began.
    """
    decided_s = replica.began_s if replica.asynchronous and replica.running else np.inf
    while replica.waiting and budget > 0 and replica.running < replica.max_num_seqs:
        slot = replica.first
        request = state.requests[slot]
        if request.arrived_s > decided_s:
            break
        length = request.prompt + request.sent
        known = unused = 0
        if replica.prefix_caching:
            # Always compute the last token: its logits give the first output token.
            limit = min((length - 1) // BLOCK_TOKENS, request.prefix_blocks)
            while known < limit:
                node = state.index[replica.index + blocks.find(state, replica, state.blocks[request.blocks_at + known])]
                if node == NONE:
                    break
                unused += state.nodes[node].users == 0
                known += 1
        cached = known * BLOCK_TOKENS
        tokens = min(length - cached, budget)
        private = blocks.held(cached + tokens) - known
        needed = blocks.held(length) - known if replica.reserves_sequence else private
        if needed + unused > replica.kv_blocks - replica.used:
            break
        for number in range(known):
            blocks.share(state, replica, state.blocks[request.blocks_at + number])
            state.blocks[request.blocks_at + request.prefix_blocks + number] = 1
        blocks.take(state, replica, private)
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
def _drafts(replica: Record, request: Record) -> bool:
    """Return whether the drafter may draft for a request; False beyond a limit that only stops its own drafts."""
    return not replica.beyond_none or request.prompt + request.sent + replica.drafted_k <= replica.drafter_tokens


@compiled
def _step(state: FleetState, number: int, ended: int) -> int:  # noqa: PLR0912, PLR0915 -- one pass over the batch
    """Run one iteration if there is anything to run; return the number of used entries of `finished`."""
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
            blocks.leave(state, replica, request)
            request.ended_s = replica.now_s
            state.finished[ended] = batch[column]
            ended += 1
    replica.finished += replica.running - stay
    replica.running = stay

    k = replica.drafted_k

    # Grant tokens to requests in the batch, oldest first; preempt the newest if blocks run out.
    budget = replica.max_num_batched_tokens
    preempted = False
    column = 0
    while column < replica.running:
        request = state.requests[batch[column]]
        rest = request.prompt + request.sent - request.computed
        need = rest
        most = min(k, request.depth)
        if most and rest == 1 and request.sent and _drafts(replica, request):
            if request.steps_at != NONE:
                need += min(most, state.steps[request.steps_at + request.output + request.sent])
            else:
                need += draws.draw_drafts(
                    profiles, state.drafted, request.profile, request.key, request.odds, request.sent, most
                )
        granted = min(need, budget)
        budget -= granted
        request.granted = granted
        more = max(0, blocks.held(request.computed + granted) - request.blocks)
        if more:
            while replica.kv_blocks - replica.used < more and column < replica.running:
                preempted = True
                replica.running -= 1
                slot = batch[replica.running]
                newest = state.requests[slot]
                blocks.leave(state, replica, newest)
                replica.preemptions += 1
                newest.preemptions += 1
                newest.following = replica.first
                replica.first = slot
                if replica.last == NONE:
                    replica.last = slot
                replica.waiting += 1
            if column < replica.running:
                blocks.take(state, replica, more)
                request.blocks += more
        column += 1
    staying = replica.running
    if replica.waiting and not preempted:
        _admit(state, replica, batch, budget)
    if not replica.running:
        return ended
    dummies = replica.dummies
    adaptive = replica.adaptive and k and not dummies
    if adaptive:
        choose_verified(state, replica, batch)

    batch_tokens = context_tokens = scheduled = emitting = drafting = firsts = drafted_tokens = longest = deepest = 0
    attended = 0.0
    for column in range(replica.running):
        request = state.requests[batch[column]]
        granted = request.granted
        if granted == 0:
            continue
        scheduled += 1
        batch_tokens += granted
        context_tokens += request.computed
        deepest = max(deepest, request.computed)
        longest = max(longest, request.computed + granted)
        rest = request.prompt + request.sent - request.computed
        if rest > 1:
            attended += granted * (request.computed + 0.5 * granted)
        if granted < rest:  # still in its prefill
            request.computed += granted
            if request.prefix_blocks and replica.prefix_caching:
                blocks.publish(state, replica, request)
            continue
        emitting += 1
        drafted = granted - rest
        tokens = 1
        if drafted:
            verified = drafted
            if adaptive:
                verified = request.verified
                batch_tokens -= drafted - verified
            if dummies:
                pass
            elif request.steps_at != NONE:
                tokens = min(state.steps[request.steps_at + request.sent], verified + 1)
            else:
                tokens += draws.draw_accepted(
                    profiles,
                    state.accepted,
                    state.progress,
                    state.context,
                    request.profile,
                    request.key,
                    request.odds,
                    request.prompt,
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
        # Only accepted draft tokens stay in the KV cache.
        request.computed += rest - 1 + tokens
        request.sent += tokens
        drafting += _drafts(replica, request)
        request.steps += 1
        replica.generation_tokens += tokens
        if rest > 1 and request.prefix_blocks and replica.prefix_caching:
            blocks.publish(state, replica, request)

    context_s = replica.per_context_token_s * context_tokens
    if replica.per_unsplit_token_s and drafted_tokens:
        _, unsplit, rows = _unsplit_reads(context_tokens, deepest)
        context_s = max(context_s, replica.per_unsplit_token_s * unsplit, replica.per_attended_s * rows)
    verify_s = (
        tokens_s(replica, batch_tokens)
        + replica.per_request_s * emitting
        + context_s
        + replica.per_attended_s * attended
    )
    if replica.schedule:
        replica.drafted_k = state.schedules[number, min(scheduled, replica.schedule - 1)]
    replica.dummies = replica.beyond_batch and longest + replica.drafted_k > replica.drafter_tokens
    passes = max(replica.least_passes, replica.drafted_k)
    drafting_s = 0.0
    if passes and drafting and not replica.dummies:
        if replica.parallel:
            passes = 1
        drafting_s = (
            replica.draft_base_s
            + replica.draft_verify_share * verify_s
            + (passes + replica.draft_more_passes)
            * (
                replica.draft_per_pass_s
                + replica.draft_per_request_s * drafting
                + replica.draft_per_context_token_s * context_tokens
            )
        )
    duration_s = verify_s + replica.overhead_s + drafting_s
    if drafting_s or drafted_tokens:
        duration_s += replica.speculation_overhead_s
    if replica.adaptive and drafted_tokens:
        duration_s += replica.draft_adaptive_s
    replica.began_s = replica.now_s
    replica.now_s += duration_s
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
def advance(until_s: float, *fields: Any) -> int:
    """Begin every step that starts before `until_s`, given the fields of `FleetState`.

    Passing them as one tuple would take four times as long.
    """
    state = FleetState(*fields)
    replicas = state.replicas
    ended = 0
    for number in range(len(replicas)):
        replica = replicas[number]
        while replica.now_s < until_s and (replica.running or replica.waiting):
            ended = _step(state, number, ended)
    return ended


@compiled
def enqueue(replicas: Records, requests: Records, profiles: Records, slot: int, seed: int) -> None:
    """Queue a request behind those of its priority; its id, arrival, lengths, script and blocks are already set."""
    request = requests[slot]
    request.first_s = -1.0
    request.key = draws.request_key(seed, request.id)
    request.odds = draws.request_odds(request.key, profiles[request.profile].spread)
    replica = replicas[request.replica]
    if not replica.running and not replica.waiting:
        replica.now_s = max(replica.now_s, request.arrived_s)
    before, after = replica.last, np.int64(NONE)
    if before != NONE and request.priority < requests[before].priority:
        before, after = np.int64(NONE), replica.first
        while requests[after].priority <= request.priority:
            before, after = after, np.int64(requests[after].following)
    request.following = after
    if before == NONE:
        replica.first = slot
    else:
        requests[before].following = slot
    if after == NONE:
        replica.last = slot
    replica.waiting += 1


@compiled
def cancel(state: FleetState, request_id: int) -> int:
    """Remove a request from its batch or queue and free its blocks; return its slot, NONE if it is in neither."""
    for number in range(len(state.replicas)):
        replica = state.replicas[number]
        batch = state.batches[number]
        for column in range(replica.running):
            slot = batch[column]
            request = state.requests[slot]
            if request.id == request_id:
                blocks.leave(state, replica, request)
                replica.running -= 1
                for later in range(column, replica.running):
                    batch[later] = batch[later + 1]
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
                return int(waiting)
            before, waiting = waiting, np.int64(request.following)
    return NONE
