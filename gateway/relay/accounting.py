"""The outcome of an exchange (times, tokens, acceptance), for the policy and for the metrics."""

from __future__ import annotations

import math
from typing import Final, TypeGuard

from backends.backend import Backend
from backends.reported import MOST_CONTEXT_TOKENS
from backends.speculation import Method
from gateway.dialects.sse import EventStream
from gateway.dialects.usage import Usage, first_usage
from gateway.relay.answers import MeteredAnswer, PassThrough
from gateway.relay.charge import tokens_of
from gateway.relay.observers import EndedExchange
from gateway.routing.model import Model, Upstream
from gateway.telemetry.metrics import Metrics
from policies.features.prompt import BYTES_PER_TOKEN
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision, Outcome

_EMBEDDINGS: Final = Endpoint.EMBEDDINGS
_BASELINE: Final = Method.BASELINE
_ANSWERED = frozenset({"ok", "cancelled", "interrupted"})
_MOST_PER_BYTE: Final = 64
"""Tokens that an engine may compute for each byte of a request: a query is ranked against many short documents."""


def count(ended: EndedExchange, metrics: Metrics) -> None:
    """Count an exchange by its label."""
    if ended.upstream is None:
        metrics.requests.labels(ended.routed.model.name, "", "", ended.label).inc()
    else:
        ended.upstream.metrics.outcomes[ended.label].inc()


def account(ended: EndedExchange, metrics: Metrics, *, is_observed: bool, is_over: bool = False) -> None:
    """Count an exchange with its tokens and times, and pass its outcome to the policy.

    Sets `ended.tokens`, and `ended.outcome` if the request was answered. If nobody learns or observes, an answer in one
    piece is only counted: the outcome would need the features of the request, which are computed on first use. A
    request whose time was over (`is_over`) is charged although it was not answered: its engine has worked for it.
    """
    count(ended, metrics)
    if ended.usage is None and ended.stream is not None and ended.label != "ok":
        ended.usage = _latest_usage(ended.stream)
    decision, upstream, model = ended.decision, ended.upstream, ended.routed.model
    if decision is None or upstream is None:
        return
    if ended.label not in _ANSWERED:
        if is_over:
            _charge_unseen(ended, upstream, ended.routed.features.prompt_tokens)
        return
    usage = ended.usage = _believed(ended, upstream.backend, metrics)
    if not is_observed and ended.stream is None and _is_plain(usage, model):
        bound, prompt_tokens, output_tokens = upstream.metrics, usage.prompt_tokens or 0, usage.output_tokens or 0
        bound.e2e.observe(ended.times.ended_s - ended.times.arrived_s)
        bound.prompt_tokens.inc(prompt_tokens)
        bound.output_tokens.inc(output_tokens)
        ended.tokens = prompt_tokens + output_tokens
        if ended.label == "ok":
            upstream.learn_pace(ended.times.ended_s - ended.times.arrived_s - ended.times.waited_s, output_tokens)
    else:
        outcome = ended.outcome = outcome_of(ended, decision, upstream)
        ended.tokens = outcome.prompt_tokens + outcome.output_tokens
        if ended.rescued_from:  # its times and steps are not those of a single backend
            upstream.metrics.prompt_tokens.inc(outcome.prompt_tokens)
            upstream.metrics.output_tokens.inc(outcome.output_tokens)
            return
        if ended.label == "ok":
            upstream.learn_pace(outcome.e2e_s, outcome.output_tokens / outcome.request.n)
        elif ended.label == "cancelled":
            _charge_unseen(ended, upstream)
        if model.observe is not None:
            try:
                model.observe(outcome)
            except Exception as error:  # noqa: BLE001 -- the request has been served, even if the policy fails
                model.fallback.note(model.policy.name, "observe", error)
        _count_outcome(outcome, usage, upstream, metrics, ended.times.waited_s)


def charge(
    ended: EndedExchange,
    metrics: Metrics,
    path: str,
    method: str,
    body: bytes,
    answer: PassThrough | None,
    *,
    is_over: bool = False,
) -> None:
    """Charge an exchange of an endpoint that is only passed through, and count its tokens.

    Sets `ended.tokens` and `ended.outcome`. Only a `POST` with a body makes an engine work: asking again for a stored
    response, for example, reports its usage again.
    """
    decision, upstream = ended.decision, ended.upstream
    if decision is None or upstream is None or not body or method != "POST":
        return
    if ended.label not in _ANSWERED and not is_over:
        return
    events = 0
    if isinstance(answer, MeteredAnswer):
        if answer.usage is None:  # it was cut short
            answer.read_usage()
            ended.usage = answer.usage
        events = answer.events_passed
    ended.usage = _believed(ended, upstream.backend, metrics, _MOST_PER_BYTE * len(body))
    prompt_tokens, output_tokens = tokens_of(path, body, ended.usage, events)
    ended.tokens = prompt_tokens + output_tokens
    upstream.metrics.prompt_tokens.inc(prompt_tokens)
    upstream.metrics.output_tokens.inc(output_tokens)
    ended.outcome = Outcome(
        ended.routed.features,
        decision,
        upstream.backend.method,
        ended.status,
        ttft_s=None,
        tpot_s=None,
        e2e_s=ended.times.ended_s - ended.times.arrived_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_step=None,
    )


def _believed(ended: EndedExchange, backend: Backend, metrics: Metrics, more_tokens: int = 0) -> Usage | None:
    """Return the usage without what cannot be, which is counted."""
    usage = ended.usage
    if usage is None:
        return None
    most = backend.context_tokens or MOST_CONTEXT_TOKENS
    if max(usage.prompt_tokens or 0, usage.output_tokens or 0, usage.accepted_tokens or 0) > most:
        most *= ended.routed.features.n
    usage = usage.within(most + more_tokens, most)
    for what in usage.ignored:
        metrics.note_implausible(backend, what)
    return usage


def _charge_unseen(ended: EndedExchange, upstream: Upstream, prompt_tokens: int = 0) -> None:
    """Charge what was generated of an answer in one piece that was given up, besides tokens of its prompt.

    Nobody has seen it: it is estimated from the time that the engine had, and how fast it has been of late.
    """
    features, times = ended.routed.features, ended.times
    output_tokens = 0
    if not (features.stream or ended.usage or ended.unread_bytes) and features.endpoint is not _EMBEDDINGS:
        each = (times.ended_s - times.arrived_s - times.waited_s) / upstream.pace_s
        most = min(features.max_tokens or math.inf, upstream.backend.context_tokens or MOST_CONTEXT_TOKENS)
        output_tokens = round(features.n * min(each, most))
    ended.tokens += prompt_tokens + output_tokens
    upstream.metrics.prompt_tokens.inc(prompt_tokens)
    upstream.metrics.output_tokens.inc(output_tokens)


def _latest_usage(stream: EventStream) -> Usage | None:
    """Return the usage in the last events of a stream that ended early; None if it tells no output tokens."""
    usage = first_usage(stream.last_documents())
    return usage if usage is not None and usage.output_tokens else None


def _is_plain(usage: Usage | None, model: Model) -> TypeGuard[Usage]:
    """Return whether the policy does not learn, and the engine reported neither times nor acceptance."""
    return (
        usage is not None
        and usage.prompt_tokens is not None
        and usage.output_tokens is not None
        and usage.accepted_tokens is None
        and usage.drafted_tokens is None
        and usage.queue_s is None
        and usage.generation_s is None
        and model.observe is None
    )


def outcome_of(ended: EndedExchange, decision: Decision, upstream: Upstream) -> Outcome:
    """Return the outcome of a request.

    The number of tokens is the engine's, or an estimate: the number of chunks, times the usual tokens of one. Its times
    begin when the request left the gateway's queue: no backend is to blame for the wait.
    """
    routed, times, stream, usage = ended.routed, ended.times, ended.stream, ended.usage or Usage()
    features = routed.features
    single = features.n == 1
    output_tokens = usage.output_tokens
    is_estimated = output_tokens is None
    is_own = single and not ended.rescued_from
    chunks = 0 if stream is None else stream.content_chunks(features.endpoint, with_usage=not is_estimated)
    if output_tokens is None:
        if stream is not None:
            output_tokens = upstream.estimate(chunks)
        else:
            is_estimated = ended.unread_bytes > 0
            output_tokens = 0 if features.endpoint is _EMBEDDINGS else round(ended.unread_bytes / BYTES_PER_TOKEN)
    elif is_own and chunks:
        upstream.learn_chunks(output_tokens, chunks)
    tokens_per_step, steps = usage.tokens_per_step, None
    if is_own and is_estimated and not features.tools:
        steps = chunks or None
    elif is_own and tokens_per_step is None and output_tokens:
        tokens_per_step = _tokens_per_step(features, upstream.backend, output_tokens, chunks)
    generation_s = times.last_s - times.first_s if stream is not None and times.first_s else usage.generation_s
    return Outcome(
        request=features,
        decision=decision,
        method=upstream.backend.method,
        status=ended.status,
        ttft_s=times.first_s - times.arrived_s - times.waited_s if stream is not None and times.first_s else None,
        tpot_s=generation_s / (output_tokens - 1) if generation_s and single and output_tokens > 1 else None,
        e2e_s=times.ended_s - times.arrived_s - times.waited_s,
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else features.prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_step=tokens_per_step,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        cached_tokens=usage.cached_tokens,
        is_estimated=is_estimated,
        steps=steps,
    )


def _tokens_per_step(features: RequestFeatures, backend: Backend, tokens: int, chunks: int) -> float | None:
    """Return the tokens per step of an answer whose engine does not report it; None if its chunks do not tell.

    Each step of a baseline emits a token. Otherwise a chunk is a step; but the parser of calls holds chunks back, and
    chunks with more tokens than were drafted, and one, are several that were joined.
    """
    if backend.method is _BASELINE:
        return 1.0
    if features.tools or not chunks:
        return None
    per_chunk, k = max(1.0, tokens / chunks), backend.num_speculative_tokens
    return per_chunk if not k or per_chunk <= k + 1 else None


def _count_outcome(
    outcome: Outcome, usage: Usage | None, upstream: Upstream, metrics: Metrics, waited_s: float
) -> None:
    bound, temperature = upstream.metrics, outcome.request.temperature
    bound.e2e.observe(outcome.e2e_s + waited_s)
    if outcome.ttft_s is not None:
        bound.ttft.observe(outcome.ttft_s + waited_s)
    if outcome.tpot_s is not None:
        bound.tpot.observe(outcome.tpot_s)
    if usage is not None and usage.queue_s is not None:
        bound.queue.observe(usage.queue_s)
    bound.prompt_tokens.inc(outcome.prompt_tokens)
    bound.output_tokens.inc(outcome.output_tokens)
    if outcome.is_estimated:
        bound.estimated_tokens.inc(outcome.output_tokens)
    if outcome.tokens_per_step is not None:
        source = "engine" if usage is not None and usage.tokens_per_step is not None else "chunks"
        steps = outcome.output_tokens / outcome.tokens_per_step
        upstream.backend.answered_tokens += outcome.output_tokens
        upstream.backend.answered_steps += steps
        metrics.count_steps(bound, temperature, source, steps, outcome.output_tokens)
    if outcome.drafted_tokens is not None and outcome.accepted_tokens is not None:
        metrics.count_drafts(bound, temperature, outcome.drafted_tokens, outcome.accepted_tokens)
