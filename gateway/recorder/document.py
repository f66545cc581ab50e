"""The record of a request that has ended: one line of JSON, as docs/trace.md has it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.recorder.candidates import CandidateColumns
from gateway.recorder.hashes import TextHasher
from gateway.recorder.rounding import micro
from gateway.recorder.take import Taken
from gateway.transcript import read_answer
from policies.policy import Outcome
from policies.prompt import read_prompt
from policies.request import TEXT_FEATURES, Endpoint, RequestFeatures, describe
from policies.trace import VERSION

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_MOST_INTERVALS = 8192

Texts = tuple[str, str] | tuple[list[int], list[int]]
"""Of a prompt and its answer, or their token ids."""


class Draft:
    """A record but for the hashes of its texts.

    Parameters
    ----------
    texts
        To be hashed; None if none are.
    """

    __slots__ = ("document", "texts")

    def __init__(self, document: dict[str, Any], texts: Texts | None) -> None:
        self.document = document
        self.texts = texts


class Documents:
    """Makes lines of what was taken.

    Parameters
    ----------
    text
        `none`, `hashes` or `full`.
    hasher
        Makes the hashes, where they are wanted.
    """

    def __init__(self, text: str, hasher: TextHasher | None) -> None:
        self._text = text
        self._hasher = hasher
        self._candidates = CandidateColumns()

    def line(self, taken: Taken, wall_offset_s: float) -> bytes:
        """Return the line of one request; see `draft`."""
        return self.lines([self.draft(taken, wall_offset_s)])

    def draft(self, taken: Taken, wall_offset_s: float) -> Draft:
        """Return the record of a request, but for hashes.

        Parameters
        ----------
        wall_offset_s
            Seconds since 1970 when the clock of `time.perf_counter` showed 0.
        """
        body = _parsed(taken.body) if taken.body else {}
        features = _complete(taken, body)
        document: dict[str, Any] = {
            "version": VERSION,
            "id": taken.request_id.decode("latin-1"),
            "arrived_at": micro(taken.arrived_s + wall_offset_s),
            "model": features.model,
            "endpoint": features.endpoint.value,
        }
        if taken.key:
            document["key"] = taken.key
        _add_features(document, features)
        document["status"] = taken.status
        if taken.word != "ok":
            document["error"] = taken.word
        document["e2e_s"] = micro(taken.ended_s - taken.arrived_s)
        decision, backend = taken.decision, taken.backend
        if decision is not None and backend is not None:
            document["policy"] = decision.policy
            document["reason"] = decision.reason
            document["backend"] = backend.name
            document["method"] = backend.method.value
            document["propensity"] = decision.propensity
            if taken.retried_from:
                document["retried_from"] = taken.retried_from
            if taken.take.candidates:
                document["candidates"] = self._candidates.columns(features.model, taken.take, decision)
        if taken.outcome is not None:
            _add_outcome(document, taken, taken.outcome)
        if self._text == "none" or features.n != 1:
            return Draft(document, None)
        return Draft(document, self._add_text(document, taken, body, features))

    def lines(self, drafts: Sequence[Draft]) -> bytes:
        """Return the lines of records; hashing the texts of many at once takes a third of the time."""
        hasher = self._hasher
        if hasher is not None:
            _add_hashes(drafts, hasher)
        return b"".join([orjson.dumps(draft.document, option=_OPTIONS) for draft in drafts])

    def _add_text(
        self, document: dict[str, Any], taken: Taken, body: dict[str, Any], features: RequestFeatures
    ) -> Texts | None:
        """Add the text, or return what is to stand for it: of a prompt alone if the answer was too long to keep."""
        answer = taken.take.transcript
        if answer is None:
            answer = read_answer(features.endpoint, b"".join(taken.take.answer or ()), stream=True)
        prompt = taken.routed.prompt or read_prompt(body)
        prompt_ids, output_ids = answer.prompt_token_ids or prompt.ids, answer.token_ids
        if self._text == "full":
            told = {"prompt_token_ids": prompt_ids, "output_token_ids": output_ids, "output": answer.text}
            told |= _prompt(features.endpoint, body)
            document |= {name: text for name, text in told.items() if text}
            return None
        if prompt_ids and output_ids:
            return prompt_ids, output_ids
        return "\n".join(prompt.pieces), answer.text


def _add_hashes(drafts: Sequence[Draft], hasher: TextHasher) -> None:
    """Add what stands for the texts: 24 bits a unit, packed into a text."""
    texts: list[tuple[str, str]] = []
    ids: list[tuple[list[int], list[int]]] = []
    of_texts, of_ids = [], []
    for draft in drafts:
        if (both := draft.texts) is None:
            continue
        if isinstance(both[0], str):
            texts.append(both)
            of_texts.append(draft.document)
        else:
            ids.append(both)
            of_ids.append(draft.document)
    groups = ((of_texts, hasher.pack_all(texts), hasher.of_texts), (of_ids, hasher.pack_all_ids(ids), hasher.of_tokens))
    for documents, hashes, how in groups:
        for document, (prompt, output) in zip(documents, hashes, strict=True):
            if prompt:
                document["prompt_hashes"] = prompt
            if output:
                document["output_hashes"] = output
            document["hashing"] = how


def _add_features(document: dict[str, Any], features: RequestFeatures) -> None:
    if features.template:
        document["template"] = features.template
    if features.workload:
        document["workload"] = features.workload
    document["temperature"] = features.temperature
    document["top_p"] = features.top_p
    if features.max_tokens is not None:
        document["max_tokens"] = features.max_tokens
    document["n"] = features.n
    if features.stream:
        document["stream"] = True
    document["prompt_tokens"] = features.prompt_tokens
    document["output_tokens"] = 0
    document["turns"] = features.turns
    document["overlap"] = micro(features.overlap)
    document["code_share"] = micro(features.code_share)
    if features.structured:
        document["structured"] = True
    if features.tools:
        document["tools"] = True
    if features.baseline_only:
        document["baseline_only"] = features.baseline_only
    document["qps"] = micro(features.qps)
    document["in_flight"] = features.in_flight


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:  # NaN and the like, which `json` takes: such a text could not be written either
        return {}
    return document if isinstance(document, dict) else {}


def _complete(taken: Taken, body: dict[str, Any]) -> RequestFeatures:
    """Return the features of a request, those too that its policy had no need of."""
    features, model = taken.routed.features, taken.routed.model
    if not body or model.policy.text_features >= TEXT_FEATURES:
        return features
    return describe(
        features.endpoint,
        body,
        model=features.model,
        default_temperature=model.default_temperature,
        qps=features.qps,
        in_flight=features.in_flight,
        workload=features.workload,
    )


def _add_outcome(document: dict[str, Any], taken: Taken, outcome: Outcome) -> None:
    usage = taken.usage
    document["prompt_tokens"] = outcome.prompt_tokens
    document["output_tokens"] = outcome.output_tokens
    if outcome.cached_tokens is not None:
        document["cached_tokens"] = outcome.cached_tokens
    if outcome.ttft_s is not None:
        document["ttft_s"] = micro(outcome.ttft_s)
    if len(taken.take.chunks) > 1:
        document["itl"] = _intervals(taken.take.chunks)
    if usage is not None and usage.queue_s is not None:
        document["queue_s"] = usage.queue_s
    spec: dict[str, Any] = {}
    if outcome.drafted_tokens is not None:
        spec["drafted_tokens"] = outcome.drafted_tokens
        if usage is not None and usage.drafting_steps is not None:
            spec["drafting_steps"] = usage.drafting_steps
    if outcome.accepted_tokens is not None:
        spec["accepted_tokens"] = outcome.accepted_tokens
    steps = {arm.partition(":")[0]: length for arm, length in outcome.lookups.items()}
    if outcome.tokens_per_step is not None:
        spec["tokens_per_step"] = micro(outcome.tokens_per_step)
        steps[outcome.method.value] = outcome.tokens_per_step
    if spec:
        document["spec"] = spec
    if steps:
        document["acceptance"] = {method: {"mean_acceptance_length": micro(one)} for method, one in steps.items()}


def _intervals(chunks: array[float]) -> npt.NDArray[np.float32]:
    """Return the seconds between chunks; of an endless stream, the first of them."""
    return np.diff(np.frombuffer(chunks)[: _MOST_INTERVALS + 1]).round(6).astype(np.float32)


def _prompt(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt as `prompt` or as `messages` in the form of the chat API."""
    given, system = body.get("prompt"), body.get("system") or body.get("instructions")
    messages = body.get("messages")
    if isinstance(asked := body.get("input"), str):
        given = asked if endpoint is Endpoint.EMBEDDINGS else None
        messages = [{"role": "user", "content": asked}]
    elif isinstance(asked, list) and asked and all(isinstance(one, dict) for one in asked):
        messages = asked
    if isinstance(given, str):
        return {"prompt": given}
    if not isinstance(messages, list):
        return {}
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}
