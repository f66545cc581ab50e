"""Asking replicas for what a configuration does not say: their model, and how they speculate."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping

import httpx

from backends.engine_metrics import read_metrics
from backends.http.bounded import PLAIN, get
from backends.speculation import Method
from gateway.importer.configuration import Configuration, Replica, Speculation
from gateway.importer.engine import speculation

_TIMEOUT_S = 3.0
_AT_ONCE = 16
_MAX_BYTES = 2**23
_KEPT = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


def ask(configuration: Configuration, environ: Mapping[str, str] = os.environ) -> None:
    """Ask the replicas for their model and speculation, where the configuration does not name them.

    A replica that does not answer stays as it is, with a note.
    """
    asyncio.run(_ask_all(configuration, environ))


async def _ask_all(configuration: Configuration, environ: Mapping[str, str]) -> None:
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(replica: Replica) -> None:
        if "url" not in replica.where or (replica.model is not None and replica.speculation is not None):
            return
        async with limit:
            await _ask(replica, environ)

    await asyncio.gather(*(one(replica) for replica in configuration.replicas))


async def _ask(replica: Replica, environ: Mapping[str, str]) -> None:
    url, key = (_value(text, environ) for text in (replica.where["url"], replica.key or replica.api_key or ""))
    headers = PLAIN | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as client:
            if replica.model is None:
                replica.model = await _model(client)
            if replica.speculation is None:
                replica.speculation = await _speculation(client)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        replica.notes.append(f"it could not be asked ({type(error).__name__})")


async def _model(client: httpx.AsyncClient) -> str | None:
    """Return the first model that a replica lists; None if it lists none."""
    match json.loads(await _get(client, "/v1/models") or b"null"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    return None


async def _speculation(client: httpx.AsyncClient) -> Speculation | None:
    """Return how a replica speculates; None if its pages do not tell.

    vLLM's `/metrics` has the series of speculation, one for each position of a draft, only if it speculates. The
    method is in `/server_info`, which only servers in development mode have.
    """
    page = await _get(client, "/metrics")
    metrics = read_metrics(page) if page else None
    if page is None or metrics is None:
        return None
    if b"vllm:spec_decode_num_drafts" not in page:
        return Speculation(Method.BASELINE)
    match json.loads(await _get(client, "/server_info?config_format=json") or b"null"):
        case {"vllm_config": {"speculative_config": dict(config)}}:
            return speculation({key: config[key] for key in _KEPT if config.get(key) is not None})
    k = len(metrics.accepted_per_position)
    note = f"it drafts {k} tokens per step, but does not say how: set method and speculative_config"
    return Speculation(Method.BASELINE, note=note)


async def _get(client: httpx.AsyncClient, path: str) -> bytes | None:
    """Return the body of an answer; None if its status is not 200."""
    status, body = await get(client, path, _MAX_BYTES)
    return body if status == httpx.codes.OK else None


def _value(text: str, environ: Mapping[str, str]) -> str:
    is_variable = text.startswith("${") and text.endswith("}")
    return environ.get(text[2:-1], "") if is_variable else text
