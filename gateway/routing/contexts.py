"""Replicas of one model whose engines have contexts of different length, as a drafter with a shorter one causes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from backends.backend import Backend
from backends.health import State
from backends.probe import as_json
from gateway.dialects.errors import GatewayError
from policies.features.request import RequestFeatures

_MARGIN: Final = 1.25
"""Ratio by which a prompt's tokens may exceed their estimate from its text."""
_TOO_LONG: Final = re.compile(
    r"(?:(?:'max_tokens' or 'max_completion_tokens' is too large: \d+\. )?This model's maximum context length is "
    r"|max_\w{1,40}=\d+ cannot be greater than max_model_len="
    r"|Input length \(\d+\) exceeds model's maximum context length \("
    r"|The decoder prompt \(length \d+\) [\w ()]{0,99}is longer than the maximum model length of "
    r"|The input \(\d+ tokens\) is longer than the model's context length \("
    r"|Requested token count exceeds the model's maximum context length of )(\d{1,8})\b"
)
"""How vLLM and SGLang reject a request for its length; none of these messages starts with a client's own words."""


def fitting(request: RequestFeatures, backends: Sequence[Backend]) -> Sequence[Backend]:
    """Return the backends whose engines accept a request; those with the longest context if it may be too long for all.

    An engine rejects a prompt that leaves no room for an answer, and a token limit above its context; it cuts an answer
    that runs out of room. The answer is assumed to be of usual length: clients set limits that answers rarely reach.
    """
    prompt = request.prompt_tokens if request.unseen is None else request.unseen.most_tokens
    answer = request.context_tokens - request.prompt_tokens
    tokens = max(_MARGIN * prompt + answer, request.max_tokens or 0)
    lengths = [(one, one.engine.said.context_tokens) for one in backends]
    least = min(tokens, max([each for _, each in lengths], default=0))
    return [one for one, each in lengths if not each or each >= least]


def refusal_of(answer: bytes) -> tuple[int, str]:
    """Return the context of an engine that rejects a request for its length, and its message; 0 for other answers.

    Examples
    --------
    >>> refusal_of(b'{"error": {"message": "max_tokens=90 cannot be greater than max_model_len=64."}}')
    (64, 'max_tokens=90 cannot be greater than max_model_len=64.')
    """
    match as_json(answer):
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            found = _TOO_LONG.match(message)
            return (int(found[1]), message) if found else (0, "")
    return 0, ""


def longer(backends: Sequence[Backend], than: Backend) -> list[Backend]:
    """Return the backends that may accept what one rejected for its length, including those of unknown length."""
    refused = than.engine.said.context_tokens
    return [one for one in backends if not one.engine.said.context_tokens or one.engine.said.context_tokens > refused]


def none_takes_it(message: str, backends: Sequence[Backend], others: Sequence[Backend]) -> GatewayError:
    """Return the error for a request too long for all: an engine's own message, and the context of each replica.

    The client may send it again while one of `others`, which may serve it and have a longer context, is away.
    """
    lengths = [(one, one.engine.said.context_tokens) for one in backends]
    said = [f"{one.name} {tokens:,}" if tokens else f"{one.name} (not told)" for one, tokens in lengths]
    away = [one.name for one in backends if one.health.state is not State.UP]
    also = f" Not up: {', '.join(away)}." if away else ""
    message += f" Tokens of context by replica: {', '.join(said)}.{also}"
    if any(one.name in away and one.engine.said.context_tokens for one in others):
        return GatewayError(503, message, code="no_backend", retry_after_s=2.0)
    return GatewayError(400, message, code="context_length_exceeded")


def nearest(request: RequestFeatures, backends: Sequence[Backend]) -> Sequence[Backend]:
    """Return the backends whose context range contains the prompt, or is nearest; without a range, any prompt fits."""
    tokens = request.prompt_tokens
    ranges = [one.context_range or (tokens, tokens) for one in backends]
    apart = [max(least - tokens, tokens - most, 0) for least, most in ranges]
    least_apart = min(apart)
    return [one for one, each in zip(backends, apart, strict=True) if each == least_apart]
