"""The requests that one replica served, and how much of each cost their times contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.calibration.batch_schedule import unsplit_reads
from backends.calibration.calibration import Calibration, Kind
from backends.calibration.parameters import EngineParameters
from backends.draft_schedule import draft_tokens
from backends.speculation import Method
from lab.statistics import Floats

Cost = tuple[str, str]
"""Where a cost belongs (`step`, or a method; empty for the whole request), and its name there."""
ATTENDED: Cost = ("step", "per_attended_s")
OUTSIDE: Cost = ("", "outside_s")
EACH = ("sent_s", "prompt_tokens", "cached_tokens", "output_tokens", "steps", "ttft_s", "e2e_s")
"""What is known about each request; `steps` are the engine's steps that gave tokens."""


@dataclass(frozen=True, kw_only=True)
class ServedPart:
    """A closed loop, or a part of a recording; arrays of shape (requests,), in sending order."""

    method: Method
    config: Mapping[str, Any] = field(default_factory=dict)  # speculative config without the method
    sent_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats  # of the prompt, in the engine's prefix cache
    output_tokens: Floats
    steps: Floats  # of the engine, that gave tokens
    ttft_s: Floats  # NaN for an answer in one piece
    e2e_s: Floats
    drafted: float = 0.0  # draft tokens per step
    every: int = 1  # 2: a fit sees every other request; the rest judge it
    concurrency: int = 0  # of a closed loop
    kind: Kind | None = None  # kind of the texts; None if generated
    temperature: float | None = None
    by_position: tuple[float, ...] = ()  # share of the steps with a draft that accepted each position
    kv_tokens: int = 0  # capacity of the engine's KV cache; 0 if it does not say

    @property
    def k(self) -> int:
        """Tokens that a step drafts at most."""
        return draft_tokens(self.method, self.config)

    @property
    def times_s(self) -> tuple[Floats, Floats, Floats]:
        """When requests were sent, gave their first token and ended; an answer in one piece starts when sent."""
        known_s = np.where(np.isnan(self.ttft_s), 0.0, self.ttft_s)
        # A first token follows its own prompt, even if no time has passed.
        return self.sent_s, self.sent_s + np.maximum(known_s, 1e-9), self.sent_s + self.e2e_s

    def some(self, chosen: slice | npt.NDArray[np.bool_]) -> ServedPart:
        """Return some of the requests."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in EACH})

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


_TOGETHER, _PARTS = 32, 64  # requests examined together, and the most such groups

FEWEST_STEPS = 4
"""Least steps of an answer whose time after the first token counts."""


class StepRows(NamedTuple):
    """Times, and how much of each cost they contain; arrays of shape (times,)."""

    seconds: Floats
    amounts: Mapping[Cost, Floats]
    is_first: bool  # whether they end with the first token

    def expected_s(self, costs: Mapping[Cost, float]) -> Floats:
        """Return the times that some costs give."""
        return sum(
            (each * costs.get(cost, 0.0) for cost, each in self.amounts.items()), np.full(len(self.seconds), 1e-9)
        )


def rows_of(served: ServedPart, like: Calibration) -> Iterator[StepRows]:
    """Yield the times of some requests: to the first token and after it, or both together if that is unknown."""
    ended_s = served.sent_s + served.e2e_s
    starts = range(0, len(served.sent_s), served.every * _TOGETHER)
    for part in dict.fromkeys(np.linspace(0, len(starts) - 1, min(_PARTS, len(starts))).round().astype(int).tolist()):
        some = slice(starts[part], starts[part] + served.every * _TOGETHER, served.every)
        load = served.some((ended_s > served.sent_s[some].min()) & (served.sent_s < ended_s[some].max()))
        yield from _rows(served.some(some), load, like)


def _rows(served: ServedPart, load: ServedPart, like: Calibration) -> Iterator[StepRows]:
    """Yield the times of requests, given everything that their replica served meanwhile."""
    prompt, known, (sent_s, first_s, ended_s) = served.prompt_tokens, ~np.isnan(served.ttft_s), served.times_s
    _, firsts_s, ends_s = load.times_s
    held = load.prompt_tokens + load.output_tokens / 2
    shared_s = np.minimum.outer(ended_s, ends_s) - np.maximum.outer(first_s, firsts_s)
    share = np.maximum(shared_s, 0.0) / np.maximum(ended_s - first_s, 1e-9)[:, None]
    beside = (first_s[:, None] < firsts_s) & (firsts_s <= ended_s[:, None])  # whose prompts its steps also computed
    later = np.maximum(1.0, served.steps - 1)
    after = _amounts(served, load, like, later, share.sum(axis=1), share @ held, beside.astype(float))
    running = (firsts_s <= sent_s[:, None]) & (sent_s[:, None] < ends_s)
    batch = running.sum(axis=1).astype(float)
    joined = ((sent_s[:, None] < firsts_s) & (firsts_s <= first_s[:, None])).astype(float)
    parameters = EngineParameters.of(like, served.method, served.config)
    waits = np.where(batch > 0, 1.5 if parameters.asynchronous else 0.5, 0.0)
    chunks = np.maximum(
        1.0, np.ceil(joined @ (load.prompt_tokens - load.cached_tokens) / parameters.max_num_batched_tokens)
    )
    before = _amounts(served, load, like, waits + chunks, batch + 1, running @ held, joined)
    before |= {OUTSIDE: np.ones(len(prompt))}
    both = {cost: after.get(cost, 0.0) + amount for cost, amount in before.items()}
    for of, seconds, amounts, is_first in (
        (known, served.ttft_s, before, True),
        (known & (served.steps >= FEWEST_STEPS), ended_s - first_s, after, False),
        (~known, served.e2e_s, both, False),
    ):
        if of.any():
            yield StepRows(seconds[of], {cost: each[of] for cost, each in amounts.items()}, is_first)


def _amounts(
    served: ServedPart,
    load: ServedPart,
    like: Calibration,
    steps: Floats,
    batch: Floats,
    context: Floats,
    computed: Floats,
) -> dict[Cost, Floats]:
    """Return the costs of steps by the formulas of `StepTime` and `Drafting`.

    `batch` and `context` are per step; `computed` tells which prompts of the load the steps together compute.
    """
    step, prompt, cached = like.step, load.prompt_tokens, load.cached_tokens
    decoded, prompts, joined = batch * (1 + served.drafted), computed @ (prompt - cached), computed.sum(axis=1)
    with_prompt = np.minimum(1.0, joined / steps)  # share of the steps
    longer = np.minimum(decoded + prompts / np.maximum(1, joined), step.knee_tokens)
    below = (1 - with_prompt) * np.minimum(decoded, step.knee_tokens) + with_prompt * longer
    tokens = decoded + prompts / steps
    # Drafting's share of the verification scales with it.
    own = steps * (1 + like.method(served.method).drafting.verify_share)
    reads = {("step", "per_context_token_s"): context}
    if served.k and step.per_unsplit_token_s:  # the longest of these counts, by the other calibration
        costs = ("step", "per_context_token_s"), ("step", "per_unsplit_token_s"), ATTENDED
        reads = dict(zip(costs, unsplit_reads(context, context / batch), strict=True))
        longest_s = np.maximum.reduce([getattr(step, name) * each for (_, name), each in reads.items()])
        reads = {cost: each * (getattr(step, cost[1]) * each >= longest_s) for cost, each in reads.items()}
    amounts = {
        ("step", "base_s"): own,
        ("step", "overhead_s"): steps,
        ("step", "per_token_below_knee_s"): own * below,
        ("step", "per_token_above_knee_s"): own * (tokens - below),
        ("step", "per_request_s"): own * batch,
        ("step", "no_graph_s"): own * (step.graph_tokens > 0) * (tokens > step.graph_tokens),
        ("step", "experts_s"): own * (1 - (1 - with_prompt) * (1 - step.expert_share) ** decoded),
    }
    amounts |= {cost: own * each for cost, each in reads.items()}
    amounts[ATTENDED] = amounts.get(ATTENDED, 0.0) + computed @ ((prompt**2 - cached**2) / 2)
    if served.k:
        parameters = EngineParameters.of(like, served.method, served.config)
        k = np.full(len(batch), served.k)
        if parameters.k_by_batch:
            k = np.array(parameters.k_by_batch)[np.minimum(batch.round().astype(int), len(parameters.k_by_batch) - 1)]
        passes = steps * [parameters.drafting.passes(max(parameters.least_passes, each)) for each in k]
        amounts |= {
            ("step", "speculation_overhead_s"): steps,
            (served.method.value, "base_s"): steps,
            (served.method.value, "per_pass_s"): passes,
            (served.method.value, "per_request_s"): passes * batch,
            (served.method.value, "per_context_token_s"): passes * context,
        }
    return amounts
