"""The temperature that an engine takes for a request that gives none."""

from __future__ import annotations

import math
from typing import Final

import httpx
import orjson

from backends.http.bounded import PLAIN, parts_of

VLLM_DEFAULT = 1.0
"""What vLLM takes where neither the model's `generation_config.json` nor a flag says anything."""

_MOST_ANSWER_BYTES: Final = 1 << 20


async def reported_temperature(client: httpx.AsyncClient, model: str) -> float | None:
    """Ask an engine for its default temperature, with a request for one token; None if it does not say.

    The Responses API repeats the sampling parameters that a request was given. Nothing is stored at the engine.
    """
    body = {"model": model, "input": "Hi", "max_output_tokens": 1, "store": False}
    try:
        async with client.stream("POST", "/v1/responses", json=body, headers=PLAIN) as answer:
            text = b"".join([part async for part in parts_of(answer, _MOST_ANSWER_BYTES)])
        document = orjson.loads(text) if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, orjson.JSONDecodeError):
        return None
    value = document.get("temperature") if isinstance(document, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
