"""Checks of a target before a run: its model, maximum context and token count, and whether it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from backends.engine_metrics import EngineMetrics, read_metrics
from backends.validation import UsageError
from lab.bench.prompts import Prompt, RequestFormat, TokenScale, every_word
from lab.bench.record import error_message
from lab.bench.targets import BaseUrl, Target

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What the preflight found out about a target."""

    model: str
    context_tokens: int | None  # maximum context; None if the model card does not say
    scale: TokenScale  # tokens per word of synthetic prompts


class Preflight:
    """Sends the unmeasured requests to a target."""

    def __init__(self, target: Target, base: BaseUrl, headers: list[tuple[str, str]]) -> None:
        self._target = target
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=base.address.path, trust_env=False),
            base_url=base.url,
            headers=headers,
            timeout=_TIMEOUT_S,
        )
        self.backend = ""  # replica that answered the last probe, from `x-gateway-backend`; empty without a gateway

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def inspect(self, endpoint: str, seed: int) -> TargetInfo:
        """Look up the model, and send two short requests to check the answers and to measure the token scale."""
        try:
            card = await self._card()
            model = str(card["id"])
            form = RequestFormat(endpoint, model)
            words = every_word(Random(f"{seed}/probe"))
            small, large = [(len(text), await self._probe(form, text)) for text in (words[:1], words)]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        scale = TokenScale()
        if small[1] is not None and large[1] is not None:
            scale = TokenScale.through((small[0], small[1]), (large[0], large[1]))
        context = card.get("max_model_len")
        return TargetInfo(model, context if isinstance(context, int) else None, scale)

    async def models(self) -> list[str]:
        """Return the names of all models that the target lists; empty if it has no list."""
        try:
            return [str(card["id"]) for card in await self._cards()]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    async def counters(self) -> EngineMetrics | None:
        """Return the engine's counters; None if it has none."""
        try:
            answer = await self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        return read_metrics(answer.content) if answer.status_code == 200 else None

    async def _card(self) -> Mapping[str, Any]:
        cards = await self._cards()
        model = self._target.model
        for card in cards:
            if model in {None, card["id"]}:
                return card
        names = ", ".join(card["id"] for card in cards) or "none"
        raise self._error(f"has no model '{model}'; it has {names}" if model else "lists no model; give --model")

    async def _cards(self) -> list[Mapping[str, Any]]:
        answer = await self._client.get("/v1/models")
        if answer.status_code == 404 and self._target.model is not None:
            return [{"id": self._target.model}]
        if answer.status_code in {401, 403}:
            raise self._error(f"/v1/models answered {answer.status_code}; give the key with --api-key")
        try:
            return [card for card in answer.json()["data"] if isinstance(card["id"], str)]
        except (ValueError, KeyError, TypeError):
            raise self._error(
                f"/v1/models answered {answer.status_code} without a list of models; is this an OpenAI-compatible API?"
            ) from None

    async def _probe(self, form: RequestFormat, words: Sequence[str]) -> int | None:
        """Send a prompt of these words, and return the engine's token count."""
        body = json.loads(form.body(Prompt(" ".join(words), output_tokens=1)))
        body.pop("stream_options")
        body["stream"] = False
        answer = await self._client.post(form.path, json=body)
        if answer.status_code != 200:
            text = " ".join(error_message(answer.content).split())[:300]
            raise self._error(f"a first request was answered {answer.status_code}: {text}")
        self.backend = answer.headers.get("x-gateway-backend", "")
        try:
            usage = answer.json().get("usage")
        except (ValueError, AttributeError):
            raise self._error("a first request was answered 200 with no JSON object") from None
        count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
        return count if isinstance(count, int) else None

    def _unreachable(self, error: httpx.HTTPError) -> UsageError:
        return self._error(f"cannot be reached: {type(error).__name__} {error}".rstrip())

    def _error(self, problem: str) -> UsageError:
        return UsageError(f"{self._target.url}: {problem}" if self._target.url is not None else problem)
