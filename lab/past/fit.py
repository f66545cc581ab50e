"""Fits a calibration to closed loops, regularized towards another calibration."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from backends.calibration.calibration import Calibration, Kind
from backends.speculation import Method
from lab.past.served import ATTENDED, OUTSIDE, Cost, ServedPart, StepRows, rows_of

NOISE, FIRST_NOISE = 0.01, 0.05
"""Relative standard deviations of a loop's measurements, and of its times to the first token."""
DOUBT, LEAST_DOUBT = 0.5, 0.05
"""Standard deviations of the other calibration's costs: as a share of each, and for drafting at least of a step."""
_LONG_TOKENS = 4096  # of a prompt from which its time shows attention to the tokens before
_ROUNDS = 3


def fitted(loops: Sequence[ServedPart], like: Calibration, what: str = "closed loops") -> dict[str, Any]:
    """Return a calibration's document: `like` with the times, drafting, acceptance and memory of the served requests.

    The costs are a non-negative least squares fit of relative errors, regularized towards those of `like` times the
    factor by which this machine is slower. Unmeasured methods keep the latter.
    """
    from scipy.optimize import nnls  # slow to import

    rows = [row for loop in loops for row in rows_of(loop, like)]
    groups = {"step": like.step} | {name.value: each.drafting for name, each in like.methods.items()}
    theirs = {
        (group, name): float(value) for group, each in groups.items() for name, value in each if name.endswith("_s")
    }
    of_steps = [row for row in rows if not row.is_first] or rows
    scale = float(np.median([np.median(row.seconds / row.expected_s(theirs)) for row in of_steps]))
    prior = {cost: scale * value for cost, value in theirs.items() if value}
    lacked = [(loop.method.value, name) for loop in loops if loop.k for name in ("base_s", "per_request_s")]
    if max(loop.prompt_tokens.max() for loop in loops) >= _LONG_TOKENS:
        lacked.append(ATTENDED)
    prior = dict.fromkeys([*lacked, OUTSIDE], 0.0) | prior
    free = {*lacked, OUTSIDE, *(cost for cost in prior if cost[0] != "step")}
    doubt = np.array([max(DOUBT * value, _least_doubt(cost, rows, free)) for cost, value in prior.items()])
    values = np.array(list(prior.values()))
    for _ in range(_ROUNDS):
        matrix, right = [np.eye(len(prior))], [np.array(list(prior.values())) / doubt]
        costs = dict(zip(prior, values, strict=True))
        for row in rows:
            # Requests examined together count as one measurement. The error is relative to the expected time: relative
            # to the measured one, short times would outweigh long ones, and the mean would come out too small.
            noise = FIRST_NOISE if row.is_first else NOISE
            weight = 1 / (noise * row.expected_s(costs) * len(row.seconds) ** 0.5)
            nothing = np.zeros(len(weight))
            matrix.append(np.stack([row.amounts.get(cost, nothing) * weight for cost in prior], axis=1) * doubt)
            right.append(row.seconds * weight)
        values = doubt * nnls(np.concatenate(matrix), np.concatenate(right))[0]
    document = like.model_dump(mode="json", exclude_defaults=True, exclude={"name", "methods_from", "measured"})
    measured = {loop.method.value for loop in loops}
    own = {"step": document["step"]} | {name: each["drafting"] for name, each in document["methods"].items()}
    for group, content in own.items():
        how = what if group in measured | {"step"} else "not measured"
        if group in measured:
            content.pop("unmeasured_ms", None)
        content["source"] = f"{how}; towards {like.name}'s, times {scale:.2f}"
    for name, entry in document["methods"].items():
        entry["taken_from"] = "" if name in measured else like.name
    own[""] = document
    for (group, name), value in zip(prior, values, strict=True):
        own[group][name] = float(f"{value:.4g}")
    document["memory"] |= _memory(loops, like)
    longest = max(int((loop.prompt_tokens + loop.output_tokens).max()) for loop in loops)
    document["scheduler"]["max_model_len"] = max(longest, like.scheduler.max_model_len)
    for method, acceptance in _acceptance(loops, like).items():
        entry = document["methods"][method]
        entry.pop("acceptance_like", None)
        entry["acceptance"] = acceptance
    return document


def _least_doubt(cost: Cost, rows: Sequence[StepRows], free: Container[Cost]) -> float:
    """Return the least standard deviation of a cost, as the other calibration may lack it."""
    shares = [float(np.median(row.amounts[cost] / row.seconds)) for row in rows if cost in row.amounts]
    if cost not in free or not any(shares):
        return 1e-12
    return (1.0 if cost == OUTSIDE else LEAST_DOUBT) / max(shares)


def _memory(loops: Sequence[ServedPart], like: Calibration) -> dict[str, object]:
    """Return memory that gives the KV cache an engine reported; empty if none did."""
    tokens = {loop.method: loop.kv_tokens for loop in loops if loop.kv_tokens}
    if not tokens:
        return {}
    method = min(tokens, key=lambda each: each is not Method.BASELINE)
    draft, memory = like.methods[method], like.memory
    room_gib = tokens[method] * (memory.kv_kib_per_token + draft.kv_kib_per_token) / 2**20
    used_gib = room_gib + memory.weights_gib + draft.weights_gib + memory.reserved_gib
    source = f"the engine's KV cache, {tokens[method]} tokens; weights, utilization and reserve of {like.name}"
    return {"gpu_gib": round(used_gib / memory.utilization, 4), "source": source}


def _acceptance(loops: Sequence[ServedPart], like: Calibration) -> dict[Method, dict[str, Any]]:
    """Return the acceptance at temperature 0 that explains the counts, with the spread between requests of `like`."""
    found: dict[Method, dict[str, Any]] = {}
    lookups = (Method.NGRAM, Method.SUFFIX)  # replayed on the text
    counted = [loop for loop in loops if loop.by_position and loop.kind and loop.method not in lookups]
    for method, kind in dict.fromkeys((loop.method, loop.kind or Kind.CHAT) for loop in counted):
        own = [loop for loop in counted if (loop.method, loop.kind) == (method, kind)]
        rates = np.full((len(own), max(len(loop.by_position) for loop in own)), np.nan)
        for loop, row in zip(own, rates, strict=True):
            at = like.temperature.default if loop.temperature is None else loop.temperature
            reached = np.array([1.0, *loop.by_position])
            row[: len(reached) - 1] = reached[1:] / np.maximum(reached[:-1], 1e-9) / like.temperature.factor(at)
        weights = np.array([[loop.steps.sum()] for loop in own]) * ~np.isnan(rates)
        rate = np.clip(np.nansum(rates * weights, axis=0) / weights.sum(axis=0), 0.001, 0.995)
        spread = like.acceptance(method, kind).request_spread
        # A spread of the logits pulls the mean towards 1/2, by this to second order.
        logits = np.log(rate / (1 - rate)) - spread**2 / 2 * (1 - 2 * rate)
        by_position = (1 / (1 + np.exp(-logits))).round(4).tolist()
        entry = {
            "by_position": by_position,
            "request_spread": spread,
            "source": "counted in closed loops; not the spread",
        }
        theirs = {name.value: each.model_dump(mode="json") for name, each in like.methods[method].acceptance.items()}
        found.setdefault(method, theirs or {Kind.CHAT.value: entry})[kind.value] = entry
    return found
