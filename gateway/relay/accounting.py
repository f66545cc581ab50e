"""The conclusion of an exchange: its outcome (times, tokens, acceptance), what it is charged, and who is told."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final, TypeGuard

from backends import background
from backends.backend import Backend
from backends.reported import MOST_CONTEXT_TOKENS
from backends.speculation import Method
from gateway.dialects.usage import Usage, first_usage
from gateway.relay.answers import MeteredAnswer, PassThrough
from gateway.relay.observers import EndedExchange, tell
from gateway.routing.model import Model, Upstream
from gateway.routing.series import RequestSeries
from policies.features.prompt import BYTES_PER_TOKEN
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision, Outcome

if TYPE_CHECKING:
    from gateway.relay.attempt import Attempt
    from gateway.relay.context import Inbound
    from gateway.relay.exchange import Exchange

_OTHER: Final = Endpoint.OTHER
_EMBEDDINGS: Final = Endpoint.EMBEDDINGS
_BASELINE: Final = Method.BASELINE
_ANSWERED = frozenset({"ok", "cancelled", "interrupted"})
_MOST_PER_BYTE: Final = 64
"""Tokens that an engine may compute for each byte of a request: a query is ranked against many short documents."""

_AUDIO: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_AUDIO_TOKENS_PER_S: Final = 50
"""Positions of Whisper's encoder: 1,500 for each 30 s."""

_AUDIO_BYTES_PER_S: Final = 8_000
"""Of a compressed recording, 64 kbit/s; few are smaller than a third of this."""


def conclude(exchange: Exchange, status: int, label: str, *, is_over: bool = False) -> int:
    """Account for an exchange, give up its place, and have its observers see its end, whatever one of these raises.

    A request whose time was over (`is_over`) is charged although it was not answered: its engine has worked for it.
    Returns the tokens of the answer.
    """
    relay, routed, delivery, attempt = exchange.relay, exchange.routed, exchange.delivery, exchange.attempt
    assert routed is not None
    answer, metrics = delivery.answer, relay.metrics
    routed.model.traffic.end(routed.client)
    delivery.times.ended_s = time.perf_counter()
    ended = EndedExchange(
        delivery.request_id,
        exchange.inbound.request_headers.client,
        routed,
        None if attempt is None else attempt.decision,
        None if attempt is None else attempt.upstream,
        delivery.retried_from,
        status,
        label,
        delivery.times,
        None if answer is None else answer.usage,
        None if answer is None else answer.events,
        unread_bytes=0 if answer is None else answer.unread_bytes,
    )
    ended.was_paused = delivery.was_paused
    try:
        if exchange.rescuer is not None:
            exchange.rescuer.note(ended)
        if attempt is None:
            metrics.requests.labels(routed.model.name, "", "", label).inc()
        else:
            attempt.upstream.metrics.outcomes[label].inc()
            if delivery.endpoint is _OTHER:
                _charge(ended, attempt, metrics, exchange.inbound, answer, is_over=is_over)
            else:
                _account(ended, attempt, metrics, is_observed=bool(delivery.observers), is_over=is_over)
        if ended.tokens:
            metrics.keys.labels(ended.client.name).inc(ended.tokens)
    except Exception as error:  # noqa: BLE001 -- a defect here must not keep the place of a key
        background.note("accounting", error, of=routed.model.name)
    try:
        relay.limits.leave(ended.client, ended.tokens)
    except Exception as error:  # noqa: BLE001 -- the place is free; what it is charged cannot be added up
        background.note("accounting", error, of=ended.client.name)
    if delivery.observers:
        tell(delivery.observers, lambda observer: observer.on_end(ended))
    if ended.outcome is not None:
        return ended.outcome.output_tokens
    return 0 if ended.usage is None else ended.usage.output_tokens or 0


def _account(
    ended: EndedExchange, attempt: Attempt, metrics: RequestSeries, *, is_observed: bool, is_over: bool
) -> None:
    """Count the tokens and times of an exchange, and pass its outcome to the policy.

    Sets `ended.tokens`, and `ended.outcome` if the request was answered. If nobody learns or observes, an answer in one
    piece is only counted: the outcome would need the features of the request, which are computed on first use.
    """
    if ended.usage is None and ended.stream is not None and ended.label != "ok":
        latest = first_usage(ended.stream.last_documents())
        ended.usage = latest if latest is not None and latest.output_tokens else None
    upstream, model, times = attempt.upstream, ended.routed.model, ended.times
    if ended.label not in _ANSWERED:
        if is_over:
            _charge_unseen(ended, upstream, ended.routed.features.prompt_tokens)
        return
    usage, bound = _believed(ended, attempt, metrics), upstream.metrics
    ended.usage = usage
    if ended.routed.unseen is not None and usage is not None and not ended.rescued_from:
        _learn_parts(ended, usage.prompt_tokens)
    if not is_observed and ended.stream is None and _is_plain(usage, model):
        prompt_tokens, output_tokens = usage.prompt_tokens or 0, usage.output_tokens or 0
        bound.e2e.observe(times.ended_s - times.arrived_s)
        bound.prompt_tokens.inc(prompt_tokens)
        bound.output_tokens.inc(output_tokens)
        ended.tokens = prompt_tokens + output_tokens
        metrics.count_context(upstream.backend, bound, ended.tokens)
        if ended.label == "ok" and not ended.was_paused:
            upstream.learn_pace(times.ended_s - times.arrived_s - times.waited_s, output_tokens)
        return
    outcome = ended.outcome = outcome_of(ended, attempt.decision, upstream)
    ended.tokens = outcome.prompt_tokens + outcome.output_tokens
    if ended.rescued_from:  # its times and steps are not those of a single backend
        bound.prompt_tokens.inc(outcome.prompt_tokens)
        bound.output_tokens.inc(outcome.output_tokens)
        return
    if ended.label == "ok" and not ended.was_paused:
        upstream.learn_pace(outcome.e2e_s, outcome.output_tokens / outcome.request.n)
    elif ended.label == "cancelled":
        _charge_unseen(ended, upstream)
    if model.observe is not None:
        try:
            model.observe(outcome)
        except Exception as error:  # noqa: BLE001 -- the request has been served, even if the policy fails
            model.fallback.note(model.policy.name, "observe", error)
    _count_outcome(outcome, usage, upstream, metrics, times.waited_s)


def _charge(
    ended: EndedExchange,
    attempt: Attempt,
    metrics: RequestSeries,
    inbound: Inbound,
    answer: PassThrough | None,
    *,
    is_over: bool,
) -> None:
    """Charge an exchange of an endpoint that is only passed through, and count its tokens.

    Sets `ended.tokens` and `ended.outcome`. Only a `POST` with a body makes an engine work: asking again for a stored
    response, for example, reports its usage again.
    """
    upstream, body = attempt.upstream, inbound.body
    if not body or inbound.request_headers.method != "POST" or (ended.label not in _ANSWERED and not is_over):
        return
    events = 0
    if isinstance(answer, MeteredAnswer):
        if answer.usage is None:  # it was cut short
            answer.read_usage()
            ended.usage = answer.usage
        events = answer.events_passed
    ended.usage = _believed(ended, attempt, metrics, _MOST_PER_BYTE * len(body))
    prompt_tokens, output_tokens = tokens_of(inbound.path, body, ended.usage, events)
    if ended.routed.unseen is not None and ended.usage is not None:
        _learn_parts(ended, prompt_tokens)
    ended.tokens = prompt_tokens + output_tokens
    upstream.metrics.prompt_tokens.inc(prompt_tokens)
    upstream.metrics.output_tokens.inc(output_tokens)
    ended.outcome = Outcome(
        ended.routed.features,
        attempt.decision,
        upstream.backend.method,
        ended.status,
        ttft_s=None,
        tpot_s=None,
        e2e_s=ended.times.ended_s - ended.times.arrived_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_step=None,
    )


def _learn_parts(ended: EndedExchange, prompt_tokens: int | None) -> None:
    """Learn what the engine has made of the parts of a prompt that are no text."""
    routed = ended.routed
    if routed.unseen is not None and prompt_tokens is not None:
        routed.model.parts.learn(routed.unseen, routed.features.client, prompt_tokens)


def _believed(ended: EndedExchange, attempt: Attempt, metrics: RequestSeries, more_tokens: int = 0) -> Usage | None:
    """Return the usage without what cannot be, which is counted; or it is another engine, so it is probed now."""
    usage, backend = ended.usage, attempt.upstream.backend
    if usage is None:
        return None
    most = backend.context_tokens or MOST_CONTEXT_TOKENS
    if max(usage.prompt_tokens or 0, usage.output_tokens or 0, usage.accepted_tokens or 0) > most:
        most *= ended.routed.features.n
    usage.ignore_beyond(most + more_tokens, most)
    if usage.ignored:
        attempt.exchange.relay.pool.report_failure(backend)
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
    has_pace = single and not ended.was_paused  # else it is the client's
    generation_s = times.last_s - times.first_s if stream is not None and times.first_s else usage.generation_s
    return Outcome(
        request=features,
        decision=decision,
        method=upstream.backend.method,
        status=ended.status,
        ttft_s=times.first_s - times.arrived_s - times.waited_s if stream is not None and times.first_s else None,
        tpot_s=generation_s / (output_tokens - 1) if has_pace and generation_s and output_tokens > 1 else None,
        e2e_s=times.ended_s - times.arrived_s - times.waited_s,
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else features.prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_step=tokens_per_step,
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        cached_tokens=usage.cached_tokens,
        is_estimated=is_estimated,
        steps=steps,
        was_paused=ended.was_paused,
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
    outcome: Outcome, usage: Usage | None, upstream: Upstream, metrics: RequestSeries, waited_s: float
) -> None:
    bound, temperature = upstream.metrics, outcome.request.temperature
    bound.e2e.observe(outcome.e2e_s + waited_s)
    if outcome.ttft_s is not None:
        bound.ttft.observe(outcome.ttft_s + waited_s)
    if outcome.tpot_s is not None:
        bound.tpot.observe(outcome.tpot_s)
    bound.prompt_tokens.inc(outcome.prompt_tokens)
    bound.output_tokens.inc(outcome.output_tokens)
    if outcome.request.n == 1:
        metrics.count_context(upstream.backend, bound, outcome.prompt_tokens + outcome.output_tokens)
    if outcome.tokens_per_step is not None:
        source = "engine" if usage is not None and usage.tokens_per_step is not None else "chunks"
        steps = outcome.output_tokens / outcome.tokens_per_step
        upstream.backend.answered_tokens += outcome.output_tokens
        upstream.backend.answered_steps += steps
        metrics.count_steps(bound, temperature, source, steps, outcome.output_tokens)
    if outcome.drafted_tokens is not None and outcome.accepted_tokens is not None:
        metrics.count_drafts(bound, temperature, outcome.drafted_tokens, outcome.accepted_tokens)


def tokens_of(path: str, body: bytes, usage: Usage | None, events: int) -> tuple[int, int]:
    """Return the prompt and output tokens that a request is charged.

    Examples
    --------
    >>> tokens_of("/tokenize", b"x" * 40, None, 0), tokens_of("/v1/audio/translations", b"x" * 8000, None, 0)
    ((10, 0), (50, 0))
    """
    output_tokens = events
    if usage is not None:
        output_tokens = usage.output_tokens or 0
        if usage.prompt_tokens is not None:
            return usage.prompt_tokens, output_tokens
    if path in _AUDIO:
        seconds = usage.audio_s if usage is not None and usage.audio_s is not None else len(body) / _AUDIO_BYTES_PER_S
        return math.ceil(_AUDIO_TOKENS_PER_S * seconds), output_tokens
    return math.ceil(len(body) / BYTES_PER_TOKEN), output_tokens
