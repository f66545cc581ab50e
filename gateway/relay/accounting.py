"""Accounts for an exchange: its outcome (times, tokens, acceptance), and the updates of key, policy and series."""

from __future__ import annotations

import math
from typing import Final, TypeGuard

from backends import background
from backends.backend import Backend
from backends.reported import MOST_CONTEXT_TOKENS
from backends.speculation import Method
from gateway.dialects.usage import Usage, first_usage
from gateway.relay.answers import MeteredAnswer, PassThrough
from gateway.relay.context import RelayContext
from gateway.relay.delivery import Delivery
from gateway.relay.observers import EndedExchange, tell_end
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Slo
from policies.features.prompt import BYTES_PER_TOKEN
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision, Outcome

_OTHER: Final = Endpoint.OTHER
_EMBEDDINGS: Final = Endpoint.EMBEDDINGS
_BASELINE: Final = Method.BASELINE
FAILED: Final = frozenset({"engine_error", "unanswered", "interrupted"})
"""Outcomes that are not the client's fault."""
_ANSWERED: Final = frozenset({"ok", "cancelled", "interrupted"})
_RESCUES: Final = {"ok": "complete", "cancelled": "cancelled"}
_MOST_PER_BYTE: Final = 64
"""Tokens that an engine may compute per byte of a request: one query may be ranked against many short documents."""

_AUDIO: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_AUDIO_TOKENS_PER_S: Final = 50
"""Positions of Whisper's encoder: 1,500 for each 30 s."""

_AUDIO_BYTES_PER_S: Final = 8_000
"""Rate of a compressed recording, 64 kbit/s; few are below a third of it."""


def conclude(ended: Delivery, relay: RelayContext, body: bytes, *, is_over: bool) -> None:
    """End an exchange in steps; each runs even if another raises, or the key would not get its place back.

    A request that ran out of time (`is_over`) is charged although unanswered: its engine has worked for it.
    """
    model = ended.routed.model
    model.traffic.end(ended.routed.client)
    try:
        ended.conclude(*account_of(ended, body, is_over=is_over))
    except Exception as error:  # noqa: BLE001
        background.note("accounting", error, of=model.name)
    for step in (_charge, _learn, _count):
        try:
            step(ended, relay)
        except Exception as error:  # noqa: BLE001
            background.note("accounting", error, of=model.name)
    tell_end(ended.let_go(), ended)


Account = tuple[Usage | None, Outcome | None, int, int]
"""The credible usage, the outcome, and the prompt and output tokens that the key is charged."""


def account_of(ended: Delivery, body: bytes, *, is_over: bool) -> Account:
    """Return the account of an exchange.

    If nobody learns or observes, an answer in one piece has no outcome: that would need the features of the request,
    which are computed lazily.
    """
    usage, decision, upstream, request = ended.usage, ended.decision, ended.upstream, ended.request
    if decision is None or upstream is None:
        return usage, None, 0, 0
    is_answered = ended.label in _ANSWERED
    if request.endpoint is _OTHER:
        # Only a `POST` with a body costs an engine work: fetching a stored response reports its usage again.
        if not body or request.method != "POST" or not (is_answered or is_over):
            return usage, None, 0, 0
        return _passed_through(ended, decision, upstream, request.path, body, ended.answer)
    if usage is None and ended.stream is not None and ended.label != "ok":
        latest = first_usage(ended.stream.last_documents())
        usage = latest if latest is not None and latest.output_tokens else None
    if not is_answered:
        if not is_over:
            return usage, None, 0, 0
        return usage, None, ended.routed.features.prompt_tokens, _unseen_tokens(ended, upstream, usage)
    usage = _believed(usage, ended, upstream.backend)
    if not ended.observers and ended.stream is None and _is_plain(usage, ended.routed.model):
        return usage, None, usage.prompt_tokens or 0, usage.output_tokens or 0
    outcome = outcome_of(ended, usage, decision, upstream)
    output_tokens = outcome.output_tokens
    if ended.label == "cancelled" and not ended.rescued_from:
        output_tokens += _unseen_tokens(ended, upstream, usage)
    return usage, outcome, outcome.prompt_tokens, output_tokens


def _charge(ended: EndedExchange, relay: RelayContext) -> None:
    """Release the key's place in flight, and charge the tokens to the key."""
    relay.limits.leave(ended.client, ended.tokens)
    if ended.tokens:
        relay.metrics.keys.labels(ended.client.name).inc(ended.tokens)


def _learn(ended: EndedExchange, relay: RelayContext) -> None:
    """Pass the outcome to the policy and other learners; if the policy gets none, report that the request has left."""
    if not _observed(ended, relay) and ended.decision is not None:
        ended.routed.model.left(ended.decision)


def _observed(ended: EndedExchange, relay: RelayContext) -> bool:
    """Pass on what the exchange shows of the engine; return whether the policy observed the outcome."""
    upstream, usage, outcome, routed = ended.upstream, ended.usage, ended.outcome, ended.routed
    if upstream is not None and usage is not None and usage.ignored:  # it may be another engine: probe it now
        relay.pool.report_failure(upstream.backend)
    if upstream is None or ended.label not in _ANSWERED:
        return False
    is_other = outcome is not None and outcome.request.endpoint is _OTHER
    if routed.unseen is not None and usage is not None and not ended.rescued_from:
        prompt_tokens = outcome.prompt_tokens if is_other and outcome is not None else usage.prompt_tokens
        if prompt_tokens is not None:
            routed.model.parts.learn(routed.unseen, routed.features.client, prompt_tokens)
    if is_other or ended.rescued_from:  # a rescued stream's times and steps are of two backends
        return False
    has_pace = ended.label == "ok" and not ended.was_paused
    if outcome is None:
        if has_pace and usage is not None:
            upstream.learn_pace(ended.ended_s - ended.arrived_s - ended.waited_s, usage.output_tokens or 0)
        return False
    features, model = outcome.request, routed.model
    chunks = 0
    if features.n == 1 and not outcome.is_estimated and ended.stream is not None:
        chunks = ended.stream.content_chunks(features.endpoint, with_usage=True)
    if chunks:
        upstream.learn_chunks(outcome.output_tokens, chunks, tools=features.tools)
    if has_pace:
        upstream.learn_pace(outcome.e2e_s, outcome.output_tokens / features.n)
    # Drafts limited to a smaller depth than the engine's own say nothing about its method.
    is_cut = relay.router.depth(model.name, upstream.backend.name) is not None
    if model.observe is None or is_cut:
        return False
    try:
        model.observe(outcome)
    except Exception as error:  # noqa: BLE001 -- the request has been served, even if the policy fails
        model.fallback.note(model.policy.name, "observe", error)
    return True


def _count(ended: EndedExchange, relay: RelayContext) -> None:
    """Count the exchange, its tokens and its times."""
    metrics, upstream, usage, outcome = relay.metrics, ended.upstream, ended.usage, ended.outcome
    if upstream is None:
        metrics.requests.labels(ended.routed.model.name, "", "", ended.label).inc()
        return
    bound = upstream.metrics
    first = ended.routed.model.upstreams.get(ended.rescued_from)
    if first is not None:  # else it was not rescued, or the failed backend has left the pool
        metrics.rescues.labels(*first.metrics.labels, _RESCUES.get(ended.label, "failed")).inc()
    bound.outcomes[ended.label].inc()
    if usage is not None:
        for what in usage.ignored:
            metrics.note_implausible(upstream.backend, what)
    if ended.tokens:
        bound.prompt_tokens.inc(ended.prompt_tokens)
        bound.output_tokens.inc(ended.output_tokens)
    if ended.label not in _ANSWERED or ended.rescued_from:
        return
    if outcome is None:
        if usage is not None:
            bound.e2e.observe(ended.ended_s - ended.arrived_s)
            if not ended.routed.has_choices and ended.routed.items <= 1:
                metrics.count_context(upstream.backend, bound, ended.tokens)
    elif outcome.request.endpoint is not _OTHER:
        _count_outcome(outcome, usage, upstream, relay, ended.waited_s)


def _passed_through(
    ended: EndedExchange, decision: Decision, upstream: Upstream, path: str, body: bytes, answer: PassThrough | None
) -> Account:
    """Return the account of an exchange that was only passed through."""
    usage, events = ended.usage, 0
    if isinstance(answer, MeteredAnswer):
        if usage is None:  # the answer was cut short
            answer.read_usage()
            usage = answer.usage
        events = answer.events_passed
    usage = _believed(usage, ended, upstream.backend, _MOST_PER_BYTE * len(body))
    prompt_tokens, output_tokens = tokens_of(path, body, usage, events)
    outcome = Outcome(
        ended.routed.features,
        decision,
        upstream.backend.method,
        ended.status,
        ttft_s=None,
        tpot_s=None,
        e2e_s=ended.ended_s - ended.arrived_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_step=None,
    )
    return usage, outcome, prompt_tokens, output_tokens


def _believed(usage: Usage | None, ended: EndedExchange, backend: Backend, more_tokens: int = 0) -> Usage | None:
    """Return the usage without impossible values."""
    if usage is not None:
        most = backend.engine.said.context_tokens or MOST_CONTEXT_TOKENS
        told = max(usage.prompt_tokens or 0, usage.output_tokens or 0)
        if max(told, usage.accepted_tokens or 0) > most:
            most *= ended.routed.features.n
        usage.ignore_beyond(most + more_tokens, most)
    return usage


def _unseen_tokens(ended: EndedExchange, upstream: Upstream, usage: Usage | None) -> int:
    """Return the tokens generated for an answer in one piece that was given up.

    Nobody has seen them: the estimate is the time that the engine had, divided by its recent pace.
    """
    features = ended.routed.features
    if features.stream or usage or ended.unread_bytes or features.endpoint is _EMBEDDINGS:
        return 0
    each = (ended.ended_s - ended.arrived_s - ended.waited_s) / upstream.pace_s
    most = min(features.max_tokens or math.inf, upstream.backend.engine.said.context_tokens or MOST_CONTEXT_TOKENS)
    return round(features.n * min(each, most))


def _is_plain(usage: Usage | None, model: Model) -> TypeGuard[Usage]:
    """Return whether the policy does not learn, and the engine reported tokens but neither times nor acceptance."""
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


def outcome_of(ended: EndedExchange, usage: Usage | None, decision: Decision, upstream: Upstream) -> Outcome:
    """Return the outcome of a request.

    The number of tokens is the engine's, or an estimate: the number of chunks times the usual tokens per chunk. Times
    start when the request left the gateway's queue: no backend is to blame for that wait.
    """
    stream, usage, features = ended.stream, usage or Usage(), ended.routed.features
    single = features.n == 1
    output_tokens = usage.output_tokens
    is_estimated = output_tokens is None
    is_own = single and not ended.rescued_from
    chunks = 0 if stream is None else stream.content_chunks(features.endpoint, with_usage=not is_estimated)
    if output_tokens is None:
        if stream is not None:
            output_tokens = upstream.estimate(chunks, tools=features.tools)
            if features.max_tokens is not None:
                output_tokens = min(output_tokens, features.n * features.max_tokens)
        else:
            is_estimated = ended.unread_bytes > 0
            output_tokens = 0 if features.endpoint is _EMBEDDINGS else round(ended.unread_bytes / BYTES_PER_TOKEN)
    tokens_per_step, steps = usage.tokens_per_step, None
    if is_own and is_estimated and not features.tools:
        steps = chunks or None
    elif is_own and tokens_per_step is None and output_tokens:
        tokens_per_step = _tokens_per_step(features, upstream.backend, output_tokens, chunks)
    has_pace = single and not ended.was_paused  # else the pace is the client's
    generation_s = ended.last_s - ended.first_s if stream is not None and ended.first_s else usage.generation_s
    return Outcome(
        request=features,
        decision=decision,
        method=upstream.backend.method,
        status=ended.status,
        ttft_s=ended.first_s - ended.arrived_s - ended.waited_s if stream is not None and ended.first_s else None,
        tpot_s=generation_s / (output_tokens - 1) if has_pace and generation_s and output_tokens > 1 else None,
        e2e_s=ended.ended_s - ended.arrived_s - ended.waited_s,
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
    """Return the tokens per step of an answer whose engine does not report it; None if its chunks do not show it.

    Each step of a baseline emits one token. Otherwise a chunk is a step; but the parser of tool calls holds chunks
    back, and a chunk with more than k + 1 tokens joins several steps.
    """
    if backend.method is _BASELINE:
        return 1.0
    if features.tools or not chunks:
        return None
    per_chunk, k = max(1.0, tokens / chunks), backend.num_speculative_tokens
    return per_chunk if not k or per_chunk <= k + 1 else None


def _count_outcome(
    outcome: Outcome, usage: Usage | None, upstream: Upstream, relay: RelayContext, waited_s: float
) -> None:
    metrics, bound, temperature = relay.metrics, upstream.metrics, outcome.request.temperature
    bound.e2e.observe(outcome.e2e_s + waited_s)
    if outcome.ttft_s is not None:
        bound.ttft.observe(outcome.ttft_s + waited_s)
    if outcome.tpot_s is not None:
        bound.tpot.observe(outcome.tpot_s)
    if outcome.request.n == 1:
        metrics.count_context(upstream.backend, bound, outcome.prompt_tokens + outcome.output_tokens)
    if outcome.tokens_per_step is not None:
        source = "engine" if usage is not None and usage.tokens_per_step is not None else "chunks"
        steps = outcome.output_tokens / outcome.tokens_per_step
        upstream.backend.count_steps(outcome.output_tokens, steps)
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


def against_objective(ended: EndedExchange, slo: Slo) -> str:
    """Return `kept`, `missed` or `failed`; empty if unknown. `slo` applies where the request sets no bound.

    An answer in one piece shows neither its first token nor the pace after it. If both are bounded, so is the whole.
    """
    if ended.label in FAILED:
        return "failed"
    if ended.label != "ok" or ended.outcome is None:
        return ""
    features, tokens = ended.routed.features, ended.outcome.output_tokens
    ttft_s, tpot_s = features.slo_ttft_s or slo[0], features.slo_tpot_s or slo[1]
    if ended.stream is None:
        if ttft_s is None or tpot_s is None:
            return ""
        return "kept" if ended.ended_s - ended.arrived_s <= ttft_s + tpot_s * max(0, tokens - 1) else "missed"
    is_late = ttft_s is not None and ended.first_s - ended.arrived_s > ttft_s
    is_slow = tpot_s is not None and ended.outcome.tpot_s is not None and ended.outcome.tpot_s > tpot_s
    return "missed" if is_late or is_slow else "kept"
