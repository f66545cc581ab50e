"""The fit of a calibration to closed loops, towards another calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backends.calibration.calibration import Calibration, Kind
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from lab.calibrate.loops import Loop
from lab.statistics import Floats

NOISE = 0.01
"""Relative standard deviation of what a loop measures."""
DOUBT, LEAST_DOUBT = 0.5, 0.05
"""Standard deviations of the other calibration's costs: as a share of each, and of drafting at least of a step."""
_LONG_TOKENS = 4096  # of a prompt from which attention to what is before it shows in its time

Cost = tuple[str, str]
"""Where a cost is (`step`, or a method), and its name there."""
_ATTENDED: Cost = ("step", "per_attended_s")


class Rows(NamedTuple):
    """Times of one loop, and how much of each cost is in them; arrays of shape (requests,)."""

    seconds: Floats
    amounts: Mapping[Cost, Floats]


def fitted(loops: Sequence[Loop], like: Calibration) -> dict[str, Any]:
    """Return the document of a calibration: `like` with the step times, drafting, acceptance and memory of the loops.

    The costs are a non-negative least squares fit of relative errors, towards those of `like` times the factor by which
    this machine is slower. Methods that were not measured have these.
    """
    from scipy.optimize import nnls  # slow to import

    rows = [_rows(loop, like) for loop in loops]
    groups = {"step": like.step} | {name.value: each.drafting for name, each in like.methods.items()}
    theirs = {
        (group, name): float(value) for group, each in groups.items() for name, value in each if name.endswith("_s")
    }
    known = [sum(amount * theirs.get(cost, 0.0) for cost, amount in row.amounts.items()) for row in rows]
    scale = float(np.median([np.median(row.seconds / each) for row, each in zip(rows, known, strict=True)]))
    prior = {cost: scale * value for cost, value in theirs.items() if value}
    lacked = [(loop.method.value, name) for loop in loops if loop.k for name in ("base_s", "per_request_s")]
    if max(loop.prompt_tokens.max() for loop in loops) >= _LONG_TOKENS:
        lacked.append(_ATTENDED)
    prior = dict.fromkeys(lacked, 0.0) | prior
    doubt = np.array([max(DOUBT * value, _least_doubt(cost, rows)) for cost, value in prior.items()])
    matrix, right = [np.eye(len(prior))], [np.array(list(prior.values())) / doubt]
    for row in rows:
        # A loop counts as one measurement. A step that seems far too short was read late, with those after it.
        seconds = np.maximum(row.seconds, np.median(row.seconds) / 2)
        weight = 1 / (NOISE * seconds * len(seconds) ** 0.5)
        nothing = np.zeros(len(weight))
        matrix.append(np.stack([row.amounts.get(cost, nothing) * weight for cost in prior], axis=1) * doubt)
        right.append(row.seconds * weight)
    values = doubt * nnls(np.concatenate(matrix), np.concatenate(right))[0]
    document = like.model_dump(mode="json", exclude_defaults=True, exclude={"name", "methods_from"})
    measured = {loop.method.value for loop in loops}
    own = {"step": document["step"]} | {name: each["drafting"] for name, each in document["methods"].items()}
    for group, content in own.items():
        how = "closed loops" if group in measured | {"step"} else "not measured"
        content["source"] = f"{how}; towards {like.name}'s, times {scale:.2f}"
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


def _least_doubt(cost: Cost, rows: Sequence[Rows]) -> float:
    """Return how far a cost may at least be from what the other calibration has, which may lack it."""
    most = max((float(np.median(row.amounts[cost] / row.seconds)) for row in rows if cost in row.amounts), default=0.0)
    return LEAST_DOUBT / most if most and (cost[0] != "step" or cost == _ATTENDED) else 1e-12


def _rows(loop: Loop, like: Calibration) -> Rows:
    """Return the mean step of each request after its first token, by the formulas of `StepTime` and `Drafting`."""
    ones, prompt, later, step = np.ones(len(loop.steps)), loop.prompt_tokens, loop.steps - 1, like.step
    first_s, ended_s = loop.sent_s + loop.ttft_s, loop.sent_s + loop.e2e_s
    shared_s = np.minimum.outer(ended_s, ended_s) - np.maximum.outer(first_s, first_s)
    share = np.maximum(shared_s, 0.0) / (ended_s - first_s)[:, None]
    batch, context = share.sum(axis=1), share @ (prompt + loop.output_tokens / 2)
    beside = (first_s[:, None] < first_s) & (first_s <= ended_s[:, None])  # whose prompts its steps computed too
    decoded, prompts, joined = batch * (1 + loop.drafted), beside @ prompt, beside.sum(axis=1)
    with_prompt = np.minimum(1.0, joined / later)  # share of its steps
    longer = np.minimum(decoded + prompts / np.maximum(1, joined), step.knee_tokens)
    below = (1 - with_prompt) * np.minimum(decoded, step.knee_tokens) + with_prompt * longer
    tokens = decoded + prompts / later
    amounts = {
        ("step", "base_s"): ones,
        ("step", "overhead_s"): ones,
        ("step", "per_token_below_knee_s"): below,
        ("step", "per_token_above_knee_s"): tokens - below,
        ("step", "per_request_s"): batch,
        ("step", "per_context_token_s"): context * (1 + step.context_per_draft * loop.drafted),
        ("step", "no_graph_s"): ones * (step.graph_tokens > 0) * (tokens > step.graph_tokens),
        ("step", "experts_s"): 1 - (1 - with_prompt) * (1 - step.expert_share) ** decoded,
        _ATTENDED: beside @ (prompt**2 / 2) / later,
    }
    if loop.k:
        parameters = EngineParameters.of(like, loop.method, loop.config)
        passes = 1 if parameters.drafting.parallel else max(parameters.least_passes, loop.k)
        amounts |= {
            ("step", "speculation_overhead_s"): ones,
            (loop.method.value, "base_s"): ones,
            (loop.method.value, "per_pass_s"): passes * ones,
            (loop.method.value, "per_request_s"): passes * batch,
            (loop.method.value, "per_context_token_s"): passes * context,
        }
    # What drafting takes by its share of the verification stays as it is.
    return Rows((ended_s - first_s) / later / (1 + like.method(loop.method).drafting.verify_share), amounts)


def _memory(loops: Sequence[Loop], like: Calibration) -> dict[str, object]:
    """Return memory for the KV cache that an engine said it has; nothing if none did."""
    tokens = {loop.method: loop.kv_tokens for loop in loops if loop.kv_tokens}
    if not tokens:
        return {}
    method = min(tokens, key=lambda each: each is not Method.BASELINE)
    draft, memory = like.methods[method], like.memory
    room_gib = tokens[method] * (memory.kv_kib_per_token + draft.kv_kib_per_token) / 2**20
    gpu_gib = round(room_gib + memory.weights_gib + draft.weights_gib, 4)
    source = f"the engine's KV cache, {tokens[method]} tokens, and weights of {like.name}"
    return {"gpu_gib": gpu_gib, "utilization": 1.0, "reserved_gib": 0.0, "source": source}


def _acceptance(loops: Sequence[Loop], like: Calibration) -> dict[Method, dict[str, Any]]:
    """Return the acceptance at temperature 0 that gives what was counted, with the spread of requests of `like`."""
    found: dict[Method, dict[str, Any]] = {}
    lookups = (Method.NGRAM, Method.SUFFIX)  # these are replayed on the text
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
        # A spread of the logits pulls the mean towards a half: to second order by this.
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
