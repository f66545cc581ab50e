"""A first look at a target: its model, its longest context, how it counts tokens, and whether it answers at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from backends.engine_metrics import EngineMetrics, read_metrics
from backends.validation import UsageError
from lab.bench.prompts import Form, Prompt, TokenScale, every_word
from lab.bench.record import error_message
from lab.bench.targets import Base, Target

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen.

    Parameters
    ----------
    context_tokens
        The longest context; None where the model's card does not say.
    """

    model: str
    context_tokens: int | None
    scale: TokenScale


class Look:
    """The unhurried requests to a target, beside those that are measured.

    Attributes
    ----------
    backend
        Which replica answered the last of the first requests, if a gateway said so in `x-gateway-backend`.
    """

    def __init__(self, target: Target, base: Base, headers: list[tuple[str, str]]) -> None:
        self._target = target
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=base.address.path, trust_env=False),
            base_url=base.url,
            headers=headers,
            timeout=_TIMEOUT_S,
        )
        self.backend = ""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def see(self, endpoint: str, seed: int) -> Sight:
        """Find the model, and send two short requests to see that they are answered and how tokens are counted.

        Raises
        ------
        UsageError
            If it cannot be reached, does not have the model, or does not answer as it should.
        """
        try:
            card = await self._card()
            model = str(card["id"])
            form = Form(endpoint, model)
            words = every_word(Random(f"{seed}/probe"))
            small, large = [(len(text), await self._probe(form, text)) for text in (words[:1], words)]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        scale = TokenScale()
        if small[1] is not None and large[1] is not None:
            scale = TokenScale.through((small[0], small[1]), (large[0], large[1]))
        context = card.get("max_model_len")
        return Sight(model, context if isinstance(context, int) else None, scale)

    async def models(self) -> list[str]:
        """Return the names of all models that it lists; none where it has no list.

        Raises
        ------
        UsageError
            If it cannot be reached, or answers with something else.
        """
        try:
            return [str(card["id"]) for card in await self._cards()]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    async def counters(self) -> EngineMetrics | None:
        """Read the engine's counters; None if it shows none."""
        try:
            answer = await self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        return read_metrics(answer.content) if answer.status_code == 200 else None

    async def _card(self) -> Mapping[str, Any]:
        cards = await self._cards()
        wanted = self._target.model
        for card in cards:
            if wanted in {None, card["id"]}:
                return card
        names = ", ".join(card["id"] for card in cards) or "none"
        raise self._wrong(f"has no model '{wanted}'; it has {names}" if wanted else "lists no model; give --model")

    async def _cards(self) -> list[Mapping[str, Any]]:
        answer = await self._client.get("/v1/models")
        if answer.status_code == 404 and self._target.model is not None:
            return [{"id": self._target.model}]
        if answer.status_code in {401, 403}:
            raise self._wrong(f"/v1/models answered {answer.status_code}; give the key with --api-key")
        try:
            return [card for card in answer.json()["data"] if isinstance(card["id"], str)]
        except (ValueError, KeyError, TypeError):
            raise self._wrong(
                f"/v1/models answered {answer.status_code} and no list of models; is this the API?"
            ) from None

    async def _probe(self, form: Form, words: Sequence[str]) -> int | None:
        """Send a prompt of these words, and return how many tokens the engine counts."""
        body = json.loads(form.body(Prompt(" ".join(words), output_tokens=1)))
        body.pop("stream_options")
        body["stream"] = False
        answer = await self._client.post(form.path, json=body)
        if answer.status_code != 200:
            text = " ".join(error_message(answer.content).split())[:300]
            raise self._wrong(f"a first request was answered {answer.status_code}: {text}")
        self.backend = answer.headers.get("x-gateway-backend", "")
        try:
            usage = answer.json().get("usage")
        except (ValueError, AttributeError):
            raise self._wrong("a first request was answered 200 with no JSON object") from None
        count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
        return count if isinstance(count, int) else None

    def _unreachable(self, error: httpx.HTTPError) -> UsageError:
        return self._wrong(f"cannot be reached: {type(error).__name__} {error}".rstrip())

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"{self._target.url}: {what}" if self._target.url is not None else what)
