"""Which requests another backend can resume, and the request that it gets for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.json_body import decoded_body, insert_field
from policies.features.request import COMPLETIONS_MAX_TOKENS, Endpoint

COMPLETIONS_TARGET: Final = b"/v1/completions"

_COPIED: Final = frozenset(
    """model stream stream_options stream_interval temperature top_p top_k min_p logit_bias repetition_penalty
    stop_token_ids ignore_eos allowed_token_ids skip_special_tokens
    spaces_between_special_tokens priority cache_salt session_id user""".split()  # noqa: SIM905
)
"""Parameters that affect each token alike, wherever it is in an answer, and mean the same in both APIs."""

_OF_THE_PROMPT: Final = frozenset(
    """messages prompt chat_template chat_template_kwargs add_generation_prompt documents continue_final_message
    add_special_tokens truncate_prompt_tokens truncation_side reasoning_effort include_reasoning
    parallel_tool_calls""".split()  # noqa: SIM905
)
"""Parameters that shape the prompt, whose tokens are known, or the parsing of reasoning and calls, which exclude it."""

_WITHOUT_EFFECT: Final = frozenset({"metadata", "store", "service_tier", "request_id", "length_penalty"})
_LIMITS: Final = frozenset({"max_tokens", "max_completion_tokens", "min_tokens", "seed"})


_NEUTRAL: Final[Mapping[str, object]] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""Parameters that allow rescue with this value, or an empty one; for others, 0 may have a meaning."""

_KNOWN: Final = _COPIED | _OF_THE_PROMPT | _WITHOUT_EFFECT | _LIMITS


MAX_BODY_BYTES: Final = 1 << 19
"""Size of the largest request to rescue: its first event, with the ids of the prompt, is held in one piece."""


class RescuableRequest:
    """A streamed request that another backend can resume."""

    def __init__(self, endpoint: Endpoint, body: bytes, document: Mapping[str, Any]) -> None:
        self.endpoint = endpoint
        self._body = body
        self.model = document.get("model")  # name of the model, as sent by the client; None if it sent none
        # Most tokens of the answer; None for the rest of the context.
        self.max_tokens = _max_tokens(endpoint, document)
        options = document.get("stream_options") or {}
        self.with_usage = bool(options.get("include_usage"))  # whether the stream ends with its usage
        self._min_tokens: int = document.get("min_tokens") or 0

    @property
    def body(self) -> bytes:
        """The body of the request, plus `return_token_ids`; not cached, since it may be long."""
        return insert_field(self._body, b'"return_token_ids":true')

    def remaining_tokens(self, generated: int) -> int | None:
        """Return how many tokens the answer may still have; None for the rest of the context."""
        return None if self.max_tokens is None else self.max_tokens - generated

    def continuation(self, prompt_ids: list[int], ids: list[int], context_tokens: int) -> bytes:
        """Return the body of the request for the rest of the answer: a completion of all tokens so far.

        A chat without a limit names the rest of the context, since a completion without one ends after 16 tokens.
        """
        rest = max(1, context_tokens - len(prompt_ids) - len(ids))
        remaining = self.remaining_tokens(len(ids))
        sent = decoded_body(self._body)  # with the priority that the gateway has set
        document = {
            **{name: value for name, value in sent.items() if name in _COPIED},
            "prompt": prompt_ids + ids,
            "max_tokens": rest if remaining is None else remaining,
            "return_token_ids": True,
        }
        if self._min_tokens > len(ids):
            document["min_tokens"] = self._min_tokens - len(ids)
        return orjson.dumps(document)


def rescuable(endpoint: Endpoint, body: bytes, document: Mapping[str, Any]) -> RescuableRequest | None:
    """Return a request that another backend can resume; None if none can.

    An unknown parameter excludes its request: its effect may not carry across the seam.

    Examples
    --------
    >>> document = {"prompt": "a", "stream": True, "max_tokens": 9}
    >>> rescuable(Endpoint.COMPLETIONS, orjson.dumps(document), document).remaining_tokens(4)
    5
    >>> rescuable(Endpoint.COMPLETIONS, b"...", {**document, "logprobs": 1}) is None
    True
    """
    if (endpoint is not Endpoint.CHAT and endpoint is not Endpoint.COMPLETIONS) or len(body) > MAX_BODY_BYTES:
        return None
    if document.get("stream") is not True or "return_token_ids" in document or not _is_known(document):
        return None
    has_text = _has_text(document.get("messages")) if endpoint is Endpoint.CHAT else _has_prompt(document.get("prompt"))
    return RescuableRequest(endpoint, body, document) if has_text else None


def _is_known(document: Mapping[str, Any]) -> bool:
    for name in document.keys() - _KNOWN:
        value = document[name]
        if (value or type(value) in {int, float}) and value != _NEUTRAL.get(name):
            return False
    options = document.get("stream_options") or {}
    if not isinstance(options, dict) or options.get("continuous_usage_stats"):
        return False
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if not isinstance(document.get(name), (int, type(None))):
            return False
    is_greedy = document.get("temperature") == 0
    return document.get("seed") is None or is_greedy  # else the random numbers would start over


def _has_text(messages: object) -> bool:
    """Return whether all messages are text: token ids do not contain an image."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else 0
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                return False
        elif not isinstance(content, (str, type(None))):
            return False
    return True


def _has_prompt(prompt: object) -> bool:
    """Return whether there is one prompt, a text or token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        return True
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))


def _max_tokens(endpoint: Endpoint, document: Mapping[str, Any]) -> int | None:
    """Return the limit on tokens, as vLLM reads it."""
    if endpoint is Endpoint.COMPLETIONS:
        asked: int | None = document.get("max_tokens")
        return COMPLETIONS_MAX_TOKENS if asked is None else asked
    limit = document.get("max_completion_tokens")
    return document.get("max_tokens") if limit is None else limit
