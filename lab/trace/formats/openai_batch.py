"""Input files of OpenAI's batch API: a request per line, without times or answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.trace.decode import tokens_beside_text
from lab.trace.formats.format import Convert, Format, Units, of_entries
from lab.trace.values import read_object, read_string
from policies.features.prompt import add_rare, read_prompt
from policies.features.request import Endpoint

_ENDPOINTS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
}
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_AS_THEY_ARE = ("model", "messages", "prompt", "temperature", "top_p", "n", "stream")


def _begin(_: Units) -> Convert:
    """Return a function that converts a request to a record's keys."""

    def convert(document: dict[str, Any]) -> dict[str, Any]:
        body = read_object(document["body"])
        add_rare(prompt := read_prompt(body), body, None)
        known = {name: body.get(name) for name in _AS_THEY_ARE}
        given = body.get("input")
        if isinstance(given, str):
            known["prompt"] = given
        elif isinstance(given, list):
            known["messages"] = [one if isinstance(one, dict) else {"role": "user", "content": one} for one in given]
        return known | {
            "id": document["custom_id"],
            "endpoint": _ENDPOINTS.get(read_string(document["url"]), Endpoint.OTHER),
            "prompt_tokens": prompt.tokens + tokens_beside_text(prompt),
            "max_tokens": next((body[name] for name in _LIMITS if body.get(name) is not None), None),
            "tools": bool(body.get("tools")),
        }

    return convert


def _has(keys: Mapping[str, Any]) -> bool:
    return keys.keys() >= {"custom_id", "method", "url", "body"}


OPENAI_BATCH = Format(of_entries(_begin), _has)
