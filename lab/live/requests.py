"""Builds requests to an endpoint from the records of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from lab.live.generator import Request
from lab.live.texts import Texts, TokenScale
from lab.trace.record import TraceRecord
from policies.features.request import Endpoint

CHAT, COMPLETIONS = Endpoint.CHAT.value, Endpoint.COMPLETIONS.value
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
_WORKLOAD = b"x-gateway-workload"


def api_of(record: TraceRecord) -> str | None:
    """Return a request's API, `chat` or `completions`; None if it does not generate text.

    Examples
    --------
    >>> api_of(TraceRecord(prompt="Once upon")), api_of(TraceRecord(endpoint="embeddings"))
    ('completions', None)
    """
    if record.messages:
        return CHAT
    if record.endpoint in {Endpoint.EMBEDDINGS, Endpoint.OTHER}:
        return None
    if record.prompt or record.prompt_token_ids:
        return COMPLETIONS
    return COMPLETIONS if record.endpoint == COMPLETIONS else CHAT


def body_of(api: str, model: str, content: str | Sequence[Any], max_tokens: int | None, **others: Any) -> bytes:
    """Return the body of a streamed request with usage, as `vllm bench serve` sends it.

    `content` is a text, the messages of a chat, or the token ids of a completion. Fields of None are omitted, which
    leaves them to the engine.
    """
    fields: dict[str, Any] = {"model": model}
    if api == CHAT:
        fields["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        fields["max_completion_tokens"] = max_tokens
    else:
        fields |= {"prompt": content, "max_tokens": max_tokens}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, **others}
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """What an endpoint reports about itself."""

    models: tuple[str, ...]  # models that requests may name themselves
    model: str  # model of all other requests
    scales: Mapping[str, TokenScale]  # token scale by API


class LiveRequests:
    """Builds the requests for one endpoint.

    The prompt is the record's, as messages, text or token ids; else generated text of the recorded length (`Texts`).
    The answer's length is limited to the recorded one or, if that is unknown, to `max_tokens`.

    Examples
    --------
    >>> record = TraceRecord(prompt="Once upon", output_tokens=8)
    >>> request = LiveRequests([record], EndpointInfo((), "m", {}), seed="0", ignore_eos=False)(0)
    >>> request.path, b'"max_tokens":8' in request.body
    ('/v1/completions', True)
    """

    def __init__(
        self, records: Sequence[TraceRecord], info: EndpointInfo, *, prefix: str = "", seed: str, ignore_eos: bool
    ) -> None:
        self._records = records
        self._info = info
        self._prefix = prefix  # of the paths, before `/v1`
        self._texts = {api: Texts(scale, seed) for api, scale in info.scales.items()}
        self._ignore_eos = ignore_eos  # whether answers run to their limit (vLLM)

    def __call__(self, number: int) -> Request:
        """Return request `number`, which declares its workload to a gateway."""
        record = self._records[number]
        api = api_of(record) or CHAT
        limit = record.max_tokens if record.output_tokens is None else record.output_tokens
        body = body_of(
            api,
            record.model if record.model in self._info.models else self._info.model,
            record.messages or record.prompt or record.prompt_token_ids or self._texts[api].prompt(record, number),
            None if limit is None else max(1, limit),
            temperature=record.temperature,
            top_p=record.top_p,
            ignore_eos=self._ignore_eos or None,
        )
        workload = record.workload
        headers = [(_WORKLOAD, workload.encode())] if workload and workload.isascii() and workload.isprintable() else []
        return Request(self._prefix + PATHS[api], body, headers)
