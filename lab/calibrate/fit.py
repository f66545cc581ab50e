"""The fit of a calibration to closed loops, towards another calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backends.calibration.calibration import Calibration, Kind
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from lab.calibrate.loops import Loop
from lab.statistics import Floats

NOISE, TTFT_NOISE = 0.01, 0.05
"""Relative standard deviations of what a loop measures: of its steps, and of first tokens."""
DOUBT, LEAST_DOUBT = 0.5, 0.05
"""Standard deviations of the other calibration's costs: as a share of each, and of drafting at least of a step."""
_LATENCY_S = 0.005  # of a first token, outside of the engine's steps
_LONG_TOKENS = 4096  # of a prompt from which attention to what is before it shows in its time

Cost = tuple[str, str]
"""Where a cost is (`step`, or a method), and its name there."""
_ATTENDED: Cost = ("step", "per_attended_s")
_LATENCY: Cost = ("", "latency_s")


class Rows(NamedTuple):
    """Times of one loop, and how much of each cost is in them; arrays of shape (requests,)."""

    seconds: Floats
    amounts: Mapping[Cost, Floats]
    noise: float


def fitted(loops: Sequence[Loop], like: Calibration) -> dict[str, Any]:
    """Return the document of a calibration: `like` with the step times, drafting, acceptance and memory of the loops.

    The costs are a non-negative least squares fit of relative errors, towards those of `like` times the factor by which
    this machine is slower. Methods that were not measured have these.
    """
    from scipy.optimize import nnls  # slow to import

    rows = [row for loop in loops for row in _rows(loop, like)]
    groups = {"step": like.step} | {name.value: each.drafting for name, each in like.methods.items()}
    theirs = {(group, name): float(value) for group, each in groups.items() for name, value in each if _is_cost(name)}
    known = [sum(amount * theirs.get(cost, 0.0) for cost, amount in row.amounts.items()) for row in rows]
    scale = float(np.median([np.median(row.seconds / each) for row, each in zip(rows, known, strict=True)]))
    prior = {cost: value * (scale if cost[1].endswith("_s") else 1.0) for cost, value in theirs.items() if value}
    prior[_LATENCY] = _LATENCY_S
    lacked = [(loop.method.value, name) for loop in loops if loop.k for name in ("base_s", "per_request_s")]
    if max(loop.prompt_tokens.max() for loop in loops) >= _LONG_TOKENS:
        lacked.append(_ATTENDED)
    prior = dict.fromkeys(lacked, 0.0) | prior
    doubt = np.array([max(DOUBT * value, _least_doubt(cost, rows)) for cost, value in prior.items()])
    matrix, right = [np.eye(len(prior))], [np.array(list(prior.values())) / doubt]
    for row in rows:
        # A loop counts as one measurement. A step that seems far too short was read late, with those after it.
        seconds = np.maximum(row.seconds, np.median(row.seconds) / 2)
        weight = 1 / (row.noise * seconds * len(seconds) ** 0.5)
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
        own.get(group, {})[name] = float(f"{value:.4g}")
    document["memory"] |= _memory(loops, like)
    for method, acceptance in _acceptance(loops, like).items():
        entry = document["methods"][method]
        entry.pop("acceptance_like", None)
        entry["acceptance"] = acceptance
    return document


def _is_cost(name: str) -> bool:
    return name.endswith("_s") or name == "verify_share"


def _least_doubt(cost: Cost, rows: Sequence[Rows]) -> float:
    """Return how far a cost may at least be from what the other calibration has, which may lack it."""
    most = max((float(np.median(row.amounts[cost] / row.seconds)) for row in rows if cost in row.amounts), default=0.0)
    return LEAST_DOUBT / most if most and (cost[0] != "step" or cost == _ATTENDED) else 1e-12


def _rows(loop: Loop, like: Calibration) -> Iterator[Rows]:
    """Yield the mean step of each request after its first token, and the first token of requests that were alone."""
    ones, prompt, later = np.ones(len(loop.steps)), loop.prompt_tokens, loop.steps - 1
    first_s, ended_s = loop.sent_s + loop.ttft_s, loop.sent_s + loop.e2e_s
    shared_s = np.minimum.outer(ended_s, ended_s) - np.maximum.outer(first_s, first_s)
    share = np.maximum(shared_s, 0.0) / (ended_s - first_s)[:, None]
    beside = (first_s[:, None] < first_s) & (first_s <= ended_s[:, None])  # whose prompts its steps computed too
    batch, joined, knee_tokens = share.sum(axis=1), beside.sum(axis=1), like.step.knee_tokens
    tokens, prompts = batch * (1 + loop.drafted), beside @ prompt
    below = np.minimum(tokens, knee_tokens)
    with_prompt = np.minimum(tokens + prompts / np.maximum(1, joined), knee_tokens)
    step = Amounts(
        seconds=(ended_s - first_s) / later,
        steps=ones,
        batch=batch,
        below=below + (with_prompt - below) * np.minimum(1.0, joined / later),
        tokens=tokens + prompts / later,
        context=share @ (prompt + loop.output_tokens / 2),
        attended=beside @ (prompt**2 / 2) / later,
    )
    yield Rows(step.seconds, step.of_costs(loop, like), NOISE)
    if loop.concurrency == 1:
        chunks, nothing = np.ceil(prompt / like.scheduler.max_num_batched_tokens), np.zeros(len(ones))
        below = np.minimum(prompt, knee_tokens * chunks)
        first = Amounts(loop.ttft_s, chunks, ones, below, prompt, nothing, prompt**2 / 2)
        yield Rows(loop.ttft_s, first.of_costs(loop, like) | {_LATENCY: ones}, TTFT_NOISE)


class Amounts(NamedTuple):
    """What is in the steps of a time; arrays of shape (requests,)."""

    seconds: Floats
    steps: Floats
    batch: Floats  # requests
    below: Floats  # tokens below the knee
    tokens: Floats
    context: Floats
    attended: Floats

    def of_costs(self, loop: Loop, like: Calibration) -> dict[Cost, Floats]:
        """Return how much of each cost that is: the formulas of `StepTime` and `Drafting`."""
        step = like.step
        amounts = {
            ("step", "base_s"): self.steps,
            ("step", "overhead_s"): self.steps,
            ("step", "per_token_below_knee_s"): self.below,
            ("step", "per_token_above_knee_s"): self.tokens - self.below,
            ("step", "per_request_s"): self.batch,
            ("step", "per_context_token_s"): self.context * (1 + step.context_per_draft * loop.drafted),
            ("step", "no_graph_s"): self.steps * (step.graph_tokens > 0) * (self.tokens > step.graph_tokens),
            _ATTENDED: self.attended,
        }
        if loop.k:
            parameters = EngineParameters.of(like, loop.method, loop.config)
            passes = 1 if parameters.drafting.parallel else max(parameters.least_passes, loop.k)
            of_method = {
                "base_s": self.steps,
                "verify_share": self.seconds,
                "per_pass_s": passes * self.steps,
                "per_request_s": passes * self.batch,
                "per_context_token_s": passes * self.context,
            }
            amounts |= {(loop.method.value, name): amount for name, amount in of_method.items()}
            amounts["step", "speculation_overhead_s"] = self.steps
        return amounts


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
        k, rates = min(len(loop.by_position) for loop in own), []
        for loop in own:
            at = like.temperature.default if loop.temperature is None else loop.temperature
            reached = np.array([1.0, *loop.by_position[:k]])
            rates.append(reached[1:] / np.maximum(reached[:-1], 1e-9) / like.temperature.factor(at))
        rate = np.clip(np.average(rates, axis=0, weights=[loop.steps.sum() for loop in own]), 0.001, 0.995)
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
