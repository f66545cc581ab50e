"""The outcome of an exchange (times, tokens, acceptance), for the policy and for the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.http.sse import EventStream
from gateway.http.usage import Usage
from gateway.routing.model import Model, Upstream
from gateway.routing.router import RoutedRequest
from gateway.telemetry.metrics import Metrics
from policies.policy import Decision, Outcome, Policy


@dataclass(slots=True, init=False)
class Timing:
    """The times of an exchange, by `time.perf_counter`; 0.0 for what did not happen.

    Parameters
    ----------
    arrived_s, ended_s
        Arrival of the request, and end of the answer.
    first_s, last_s
        First and last chunk of a stream.
    """

    arrived_s: float
    first_s: float
    last_s: float
    ended_s: float

    def __init__(
        self,
        arrived_s: float,
        first_s: float,
        last_s: float,
        ended_s: float,
    ) -> None:
        self.arrived_s = arrived_s
        self.first_s = first_s
        self.last_s = last_s
        self.ended_s = ended_s


@dataclass(slots=True, init=False)
class EndedExchange:
    """An exchange that has ended.

    Parameters
    ----------
    status
        HTTP status of the answer.
    usage
        Usage as the engine reported it; None without a report.
    stream
        The answer's event stream; None for other answers.
    """

    routed: RoutedRequest
    decision: Decision
    upstream: Upstream
    status: int
    timing: Timing
    usage: Usage | None
    stream: EventStream | None

    def __init__(
        self,
        routed: RoutedRequest,
        decision: Decision,
        upstream: Upstream,
        status: int,
        timing: Timing,
        usage: Usage | None,
        stream: EventStream | None,
    ) -> None:
        self.routed = routed
        self.decision = decision
        self.upstream = upstream
        self.status = status
        self.timing = timing
        self.usage = usage
        self.stream = stream


def account(ended: EndedExchange, metrics: Metrics) -> Outcome:
    """Return the outcome of an exchange, after counting it and passing it to the policy."""
    outcome = outcome_of(ended)
    _count(outcome, ended, metrics)
    model = ended.routed.model
    try:
        model.policy.observe(outcome)
    except Exception as error:  # noqa: BLE001 -- the request has been served, even if the policy fails
        model.fallback.note(model.policy.name, "observe", error)
    return outcome


def is_plain(usage: Usage | None, model: Model) -> bool:
    """Return whether only the duration and the tokens of an answer in one piece need counting.

    This is the case if the policy does not learn and the engine reported neither times nor acceptance.
    """
    return (
        usage is not None
        and usage.prompt_tokens is not None
        and usage.output_tokens is not None
        and usage.accepted_tokens is None
        and usage.drafted_tokens is None
        and usage.queue_s is None
        and usage.generation_s is None
        and type(model.policy).observe is Policy.observe
    )


def count_plain(upstream: Upstream, usage: Usage, e2e_s: float) -> int:
    """Count a plain answer as `account` would; return the sum of its prompt and output tokens."""
    bound = upstream.metrics
    prompt_tokens, output_tokens = usage.prompt_tokens or 0, usage.output_tokens or 0
    bound.e2e.observe(e2e_s)
    bound.prompt_tokens.inc(prompt_tokens)
    bound.output_tokens.inc(output_tokens)
    return prompt_tokens + output_tokens


def outcome_of(ended: EndedExchange) -> Outcome:
    """Return the outcome of a request.

    The number of tokens comes from the engine's usage, else from the number and size of the chunks. Tokens per step
    come from the engine's acceptance, else from tokens per chunk: one content chunk is one step.
    """
    routed, timing, stream, usage = ended.routed, ended.timing, ended.stream, ended.usage or Usage()
    features = routed.features
    endpoint = features.endpoint
    single = features.n == 1
    output_tokens = usage.output_tokens
    if output_tokens is None:
        output_tokens = 0
        if stream is not None:
            steps = stream.steps(endpoint, with_usage=False)
            output_tokens = max(steps, round(stream.text_bytes() / routed.model.bytes_per_token))
    elif stream is not None and single:
        routed.model.learn_token_size(stream.text_bytes(), output_tokens)
    tokens_per_step = usage.tokens_per_step
    if tokens_per_step is None and stream is not None and single and output_tokens:
        steps = stream.steps(endpoint, with_usage=usage.output_tokens is not None)
        tokens_per_step = max(1.0, output_tokens / steps) if steps else None
    generation_s = timing.last_s - timing.first_s if timing.first_s else usage.generation_s
    return Outcome(
        request=features,
        decision=ended.decision,
        method=ended.upstream.backend.method,
        status=ended.status,
        ttft_s=timing.first_s - timing.arrived_s if timing.first_s else None,
        tpot_s=generation_s / (output_tokens - 1) if generation_s and single and output_tokens > 1 else None,
        e2e_s=timing.ended_s - timing.arrived_s,
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else features.prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_step=tokens_per_step,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _count(outcome: Outcome, ended: EndedExchange, metrics: Metrics) -> None:
    bound, usage, temperature = ended.upstream.metrics, ended.usage, outcome.request.temperature
    bound.e2e.observe(outcome.e2e_s)
    if outcome.ttft_s is not None:
        bound.ttft.observe(outcome.ttft_s)
    if outcome.tpot_s is not None:
        bound.tpot.observe(outcome.tpot_s)
    if usage is not None and usage.queue_s is not None:
        bound.queue.observe(usage.queue_s)
    bound.prompt_tokens.inc(outcome.prompt_tokens)
    bound.output_tokens.inc(outcome.output_tokens)
    if outcome.tokens_per_step is not None:
        source = "engine" if usage is not None and usage.tokens_per_step is not None else "chunks"
        steps = outcome.output_tokens / outcome.tokens_per_step
        metrics.count_steps(bound, temperature, source, steps, outcome.output_tokens)
    if outcome.drafted_tokens is not None and outcome.accepted_tokens is not None:
        metrics.count_drafts(bound, temperature, outcome.drafted_tokens, outcome.accepted_tokens)
