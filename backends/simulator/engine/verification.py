"""Adaptive verification: which draft tokens of a batch are worth their time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from backends.calibration import batch_schedule
from backends.simulator.engine import draws
from backends.simulator.engine.compiled import compiled
from backends.simulator.engine.state import NONE, FleetState, Floats, Record


@compiled
def _confidence(state: FleetState, request: Record, position: int, chance: float, accepted: int) -> float:
    """Return the engine's confidence that a draft token is accepted, given that those before it are.

    The engine knows the token's hardness to within a window; see `Acceptance.confidence_window`.
    """
    window = state.profiles[request.profile].window
    if window == 0.0:
        return chance
    number = 2 * (request.sent + position)
    hardness = draws.uniform(request.key, number)
    if position < accepted:
        hardness *= chance
    elif position == accepted:
        hardness = chance + hardness * (1.0 - chance)
    phase = draws.uniform(request.key, number + 1)
    low = (math.floor(hardness / window + phase) - phase) * window
    high = min(1.0, low + window)
    low = max(0.0, low)
    if chance <= low:
        return 0.0
    return float(min(1.0, (chance - low) / (high - low)))


@compiled
def _chance(state: FleetState, request: Record, position: int, odds: float) -> float:
    """Return the probability that the draft token at a position is accepted, given that those before it are."""
    rate = state.accepted[request.profile, position]
    return float(rate * odds * state.profiles[request.profile].factor / (1.0 - rate + rate * odds))


tokens_s = compiled(batch_schedule.tokens_s)


@compiled
def _profiled_s(replica: Record, tokens: int) -> float:
    """Return the seconds that the engine expects for verifying `tokens`, measured at start on dummy requests."""
    per_request_s = replica.per_request_s + replica.per_context_token_s * replica.profiled_context
    return float(tokens_s(replica, tokens) + per_request_s * min(tokens, replica.max_num_seqs))


@compiled
def _rank_drafts(
    state: FleetState, replica: Record, batch: npt.NDArray[np.int32], survival: Floats, ranked: Floats
) -> tuple[int, int, int]:
    """Fill in each draft token's probability of survival: by request, shape (running, k), and ranked, descending."""
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
            odds *= math.exp(draws.shift(state.profiles, state.progress, request.profile, request.sent))
        contexts = scheduled and request.steps_at == NONE and state.profiles[request.profile].contexts
        if contexts:
            place = draws.context_place(state.profiles, state.context, request.profile, request.prompt + request.sent)
        survives = 1.0
        for position in range(scheduled):
            shifted = odds
            if contexts:
                shifted *= draws.context_odds(state.context, request.profile, position, place)
            survives *= _confidence(state, request, position, _chance(state, request, position, shifted), accepted)
            survival[column, position] = survives
            ranked[count] = -survives
            count += 1
    ranked[:count].sort()
    for place in range(count):
        ranked[place] *= -1.0
    return count, tokens, emitting


@compiled
def choose_verified(state: FleetState, replica: Record, batch: npt.NDArray[np.int32]) -> None:
    """Choose how many draft tokens of each request to verify, as vLLM's adaptive verification does.

    It ranks draft tokens by their probability of survival, and verifies as many of the first as give the step the most
    expected tokens per second.
    """
    survival, ranked = np.zeros((replica.running, replica.k)), np.empty(replica.running * replica.k)
    count, tokens, emitting = _rank_drafts(state, replica, batch, survival, ranked)
    passes = (1 if replica.parallel else replica.k) + replica.draft_more_passes
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
    equal = budget - np.sum(ranked[:budget] > least)  # how many tokens tied with the last one still fit
    for column in range(replica.running):
        request = state.requests[batch[column]]
        scheduled = request.granted - (request.prompt + request.sent - request.computed)
        while request.verified < scheduled:
            survives = survival[column, request.verified]
            if survives < least or (survives == least and not equal):
                break
            equal -= survives == least
            request.verified += 1
