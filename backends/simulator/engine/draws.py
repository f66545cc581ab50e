"""Random draws, numbered rather than sequential: draw n of a request is the same whenever it is made."""

from __future__ import annotations

import math

import numpy as np

from backends.simulator.engine.compiled import compiled
from backends.simulator.engine.state import Floats, Records

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


@compiled
def mix(bits: np.uint64) -> np.uint64:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014; constants of Stafford's variant 13)."""
    bits = (bits ^ (bits >> _S30)) * _MIX_1
    bits = (bits ^ (bits >> _S27)) * _MIX_2
    return bits ^ (bits >> _S31)


@compiled
def uniform(key: np.uint64, number: int) -> float:
    """Return draw `number` of the stream `key`, uniform in [0, 1)."""
    return float(mix(key + np.uint64(number + 1) * _GOLDEN) >> _S11) * 2.0**-53


@compiled
def request_key(seed: int, request_id: int) -> np.uint64:
    """Return the key of a request's stream of draws."""
    return mix(mix(np.uint64(seed) * _GOLDEN) + np.uint64(request_id) * _GOLDEN)


@compiled
def request_odds(key: np.uint64, spread: float) -> float:
    """Return the log-normal factor on a request's odds of acceptance, by the Box-Muller transform."""
    if spread == 0.0:
        return 1.0
    normal = math.sqrt(-2.0 * math.log(1.0 - uniform(key, 0))) * math.cos(2.0 * math.pi * uniform(key, 1))
    return math.exp(spread * normal)


@compiled
def _reached(key: np.uint64, odds: float, shares: Floats, position: int, limit: int) -> int:
    """Return how many draft positions one draw reaches, at most `limit`, given each position's share of steps."""
    drawn = uniform(key, 2 * position + 1)
    count = 0
    # drawn < s', where s' is s with its odds multiplied, without the division
    while count < limit and drawn * (1.0 - shares[count] + shares[count] * odds) < shares[count] * odds:
        count += 1
    return count


@compiled
def shift(profiles: Records, progress: Floats, profile: int, position: int) -> float:
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
def context_place(profiles: Records, context: Floats, profile: int, tokens: int) -> float:
    """Return the place of a context among a profile's: the index of one, plus the fraction to the next in log2."""
    last = profiles[profile].contexts - 1
    at, log = context[profile, 0], math.log2(tokens)
    if log <= at[0]:
        return 0.0
    for number in range(last):
        if log < at[number + 1]:
            return float(number + (log - at[number]) / (at[number + 1] - at[number]))
    return float(last)


@compiled
def context_odds(context: Floats, profile: int, position: int, place: float) -> float:
    """Return the factor on the odds of acceptance at a draft position (from 0), given the context's place."""
    shifts, number = context[profile, position + 1], int(place)
    shift = shifts[number]
    if number < place:
        shift += (place - number) * (shifts[number + 1] - shift)
    return math.exp(shift)


@compiled
def draw_drafts(
    profiles: Records, drafted: Floats, profile: int, key: np.uint64, odds: float, position: int, limit: int
) -> int:
    """Return the number of tokens drafted by a step that starts at an output position, at most `limit`."""
    if profiles[profile].always:
        return limit
    return _reached(key, odds, drafted[profile], position, limit)


@compiled
def draw_accepted(  # noqa: PLR0917 -- see `kernel.advance`
    profiles: Records,
    accepted: Floats,
    progress: Floats,
    context: Floats,
    profile: int,
    key: np.uint64,
    odds: float,
    prompt: int,
    position: int,
    limit: int,
) -> int:
    """Return how many draft tokens of a step that starts at an output position are accepted.

    With n-gram and suffix drafting, long drafts are the accepted ones, so one draw decides both. With a draft model,
    each output token has its own hardness, as in `model_based_replay`.
    """
    if not profiles[profile].always:
        return _reached(key, odds, accepted[profile], position, limit)
    if profiles[profile].knots:
        odds *= math.exp(shift(profiles, progress, profile, position))
    factor, contexts = profiles[profile].factor, profiles[profile].contexts
    place = context_place(profiles, context, profile, prompt + position) if contexts else 0.0
    shifted = odds
    count = 0
    while count < limit:
        rate = accepted[profile, count]
        if contexts:
            shifted = odds * context_odds(context, profile, count, place)
        if not uniform(key, 2 * (position + count)) * (1.0 - rate + rate * shifted) < rate * shifted * factor:
            break
        count += 1
    return count


@compiled
def count_drawn(  # noqa: PLR0917 -- see `kernel.advance`
    profiles: Records,
    drafted: Floats,
    accepted: Floats,
    progress: Floats,
    context: Floats,
    profile: int,
    key: np.uint64,
    k: int,
    prompt: int,
    output: int,
) -> int:
    """Return how many steps a request would draw, including its prefill's."""
    if k == 0:
        return output
    odds = request_odds(key, profiles[profile].spread)
    position = steps = 1
    while position < output:
        count = draw_drafts(profiles, drafted, profile, key, odds, position, k)
        position += 1 + draw_accepted(
            profiles, accepted, progress, context, profile, key, odds, prompt, position, count
        )
        steps += 1
    return steps
