"""Spend logs of LiteLLM's proxy: a JSON object per request, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from lab.trace.formats.format import Convert, Format, Units, of_entries
from lab.trace.values import read_time
from policies.features.request import Endpoint

_ENDPOINTS = {"completion": Endpoint.CHAT, "text_completion": Endpoint.COMPLETIONS, "embedding": Endpoint.EMBEDDINGS}
_ENDPOINTS |= {"responses": Endpoint.RESPONSES, "anthropic_messages": Endpoint.MESSAGES}


def _begin(_: Units) -> Convert:
    """Return a function that converts a logged request to a record's keys; cached answers used no engine."""

    def convert(document: dict[str, Any]) -> dict[str, Any]:
        begun_s, ended_s = (read_time(document[name]) for name in ("startTime", "endTime"))
        first = document.get("completionStartTime")
        first_s = ended_s if first is None else read_time(first)
        kind = str(document.get("call_type") or "completion")
        cached = str(document.get("cache_hit")).lower() == "true"
        messages = document.get("messages")
        if isinstance(messages, str):
            messages = orjson.loads(messages or "null")
        return {
            "id": document.get("request_id"),
            "arrived_at": begun_s,
            "model": document.get("model"),
            "endpoint": Endpoint.OTHER
            if cached
            else _ENDPOINTS.get(kind) or _ENDPOINTS.get(kind.removeprefix("a"), Endpoint.OTHER),
            "session": document.get("session_id"),
            "prompt_tokens": document["prompt_tokens"],
            "output_tokens": document["completion_tokens"],
            "stream": first_s < ended_s,
            "ttft_s": first_s - begun_s if begun_s <= first_s < ended_s else None,
            "e2e_s": max(0.0, ended_s - begun_s),
            "error": "failed" if document.get("status") == "failure" else None,
            "messages": messages if isinstance(messages, list) and messages else None,
        }

    return convert


def _has(keys: Mapping[str, Any]) -> bool:
    return keys.keys() >= {"startTime", "endTime", "prompt_tokens", "completion_tokens"}


LITELLM = Format(of_entries(_begin), _has)
