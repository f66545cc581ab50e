"""Conversion of a trace's records to requests for an endpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lab.bench.prompts import Prompt, RequestFormat, TokenScale
from lab.live.texts import Texts
from lab.trace import TraceRecord
from policies.features.request import Endpoint

CHAT, COMPLETIONS = Endpoint.CHAT.value, Endpoint.COMPLETIONS.value

_WORKLOAD = b"x-gateway-workload"


def api_of(record: TraceRecord) -> str | None:
    """Return the API for a request, `chat` or `completions`; None if it does not generate text.

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


class LiveRequests:
    """Builds the requests for one endpoint.

    The prompt is that of the record, as messages, text or token ids; else generated text of the recorded length
    (`Texts`). The length of the answer is limited to the recorded one, or to `max_tokens` if that is unknown.

    Examples
    --------
    >>> record = TraceRecord(prompt="Once upon", output_tokens=8)
    >>> requests = LiveRequests([record], [], "m", {}, seed="0", ignore_eos=False)
    >>> requests.api(0), b'"max_tokens":8' in requests.body(0)
    ('completions', True)
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
        # Models that the endpoint serves; a request asks for its own model if it is one of them.
        self._models = frozenset(models)
        self._model = model  # model of all other requests
        self._texts = {api: Texts(scale, seed) for api, scale in scales.items()}
        self._ignore_eos = ignore_eos  # whether answers run to their limit (vLLM)

    def __len__(self) -> int:
        return len(self._records)

    def api(self, number: int) -> str:
        """Return the API for request `number`."""
        return api_of(self._records[number]) or CHAT

    def headers(self, number: int) -> list[tuple[bytes, bytes]]:
        """Return the headers specific to request `number`: its workload, for a gateway."""
        workload = self._records[number].workload
        return [(_WORKLOAD, workload.encode())] if workload and workload.isascii() and workload.isprintable() else []

    def body(self, number: int) -> bytes:
        """Return the body of request `number`."""
        record = self._records[number]
        api = self.api(number)
        model = record.model if record.model in self._models else self._model
        return RequestFormat(api, model, record.temperature, self._ignore_eos, record.top_p).body(
            self._prompt(api, number)
        )

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
