"""A trace's requests as they are sent to an endpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lab.bench.prompts import Form, Prompt, TokenScale
from lab.live.texts import Texts
from lab.trace import TraceRecord
from policies.features.request import Endpoint

CHAT, COMPLETIONS = Endpoint.CHAT.value, Endpoint.COMPLETIONS.value

_WORKLOAD = b"x-gateway-workload"


def api_of(record: TraceRecord) -> str | None:
    """Return which API a request is sent to, `chat` or `completions`; None for one that generates nothing."""
    if record.messages:
        return CHAT
    if record.endpoint in {Endpoint.EMBEDDINGS, Endpoint.OTHER}:
        return None
    if record.prompt or record.prompt_token_ids:
        return COMPLETIONS
    return COMPLETIONS if record.endpoint == COMPLETIONS else CHAT


class LiveRequests:
    """Writes the requests that are sent to one endpoint.

    The prompt is the record's own, as messages, text or token ids; else text of the recorded length (`Texts`). An
    answer may be as long as it was, or as `max_tokens` allowed where that is not known.

    Parameters
    ----------
    models
        Those that the endpoint serves: a request asks for its own model if it is one of them.
    model
        That the others ask for.
    scales
        Of each API, how many tokens the engine counts for so many words.
    seed
        Of the texts that are made up.
    """

    def __init__(
        self,
        records: Sequence[TraceRecord],
        models: Collection[str],
        model: str,
        scales: Mapping[str, TokenScale],
        *,
        seed: str,
        ignore_eos: bool,
    ) -> None:
        self._records = records
        self._models = frozenset(models)
        self._model = model
        self._texts = {api: Texts(scale, seed) for api, scale in scales.items()}
        self._ignore_eos = ignore_eos

    def __len__(self) -> int:
        return len(self._records)

    def api(self, number: int) -> str:
        """Return which API request `number` is sent to."""
        return api_of(self._records[number]) or CHAT

    def headers(self, number: int) -> list[tuple[bytes, bytes]]:
        """Return the headers that it alone has: what kind of text it is, for a gateway."""
        workload = self._records[number].workload
        return [(_WORKLOAD, workload.encode())] if workload and workload.isascii() and workload.isprintable() else []

    def body(self, number: int) -> bytes:
        """Write it."""
        record = self._records[number]
        api = self.api(number)
        model = record.model if record.model in self._models else self._model
        return Form(api, model, record.temperature, self._ignore_eos, record.top_p).body(self._prompt(api, number))

    def _prompt(self, api: str, number: int) -> Prompt:
        record = self._records[number]
        limit = record.max_tokens if record.output_tokens is None else record.output_tokens
        limit = None if limit is None else max(1, limit)
        if record.messages:
            return Prompt(messages=record.messages, output_tokens=limit)
        if record.prompt:
            return Prompt(record.prompt, output_tokens=limit)
        if record.prompt_token_ids:
            return Prompt(token_ids=record.prompt_token_ids, output_tokens=limit)
        return Prompt(self._texts[api].prompt(record, number), output_tokens=limit)
