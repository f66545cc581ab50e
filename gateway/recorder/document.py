"""The record of a finished request: one line of JSON (docs/replay.md)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.dialects.transcript import read_answer
from gateway.recorder.candidates import CandidateColumns
from gateway.recorder.hashes import TextHasher
from gateway.recorder.notes import RequestNotes
from gateway.recorder.rounding import micro
from gateway.recorder.schema import VERSION, Hashing
from gateway.relay.observers import EndedExchange
from policies.features.prompt import read_prompt
from policies.features.request import TEXT_FEATURES, Endpoint, RequestFeatures, describe
from policies.policy import Outcome

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_MAX_INTERVALS = 8192
_LARGEST_TOKEN_ID = 2**32 - 1
_MAX_SHORT_CHARS = 4096
"""Size of prompt and answer that are hashed on the event loop: a few microseconds if all units were seen before, half a
millisecond if none."""

Texts = tuple[str, str] | tuple[list[int], list[int]]
"""The texts of a prompt and its answer, or their token ids."""


class PendingRecord:
    """A record to be completed in the recorder's thread."""

    __slots__ = ("ended", "head", "notes", "size_bytes", "wall_offset_s")

    def __init__(self, head: bytes, notes: RequestNotes, ended: EndedExchange, wall_offset_s: float) -> None:
        # The part of the line built on the event loop, as a JSON object; empty if that part needs the request's body.
        self.head = head
        self.notes = notes
        self.ended = ended
        self.wall_offset_s = wall_offset_s  # seconds since 1970 at which `time.perf_counter` was 0
        self.size_bytes = len(head) + notes.held_bytes(ended)  # estimated memory


class _Line:
    """A line in two parts, a JSON object and further fields, with the texts to be hashed for it."""

    __slots__ = ("head", "rest", "texts")

    def __init__(self, head: bytes, rest: dict[str, Any], texts: Texts | None) -> None:
        self.head = head
        self.rest = rest
        self.texts = texts


class RecordBuilder:
    """Builds the lines of finished requests: on the event loop if that is quick, else partly in the recorder's thread.

    When a request ends, its data is still in the processor's caches and can be released at once. Unless long texts must
    be read, building its record then is cheaper than later in a thread.
    """

    def __init__(self, text: str, hasher: TextHasher | None = None, quick_hasher: TextHasher | None = None) -> None:
        self._text = text  # `none`, `hashes` or `full`
        self._hasher = hasher  # hashes texts in the thread; None without hashes
        # Hashes short texts on the event loop: a second one, since a hasher is not thread-safe. None leaves all texts
        # to the thread.
        self._quick_hasher = quick_hasher
        self._candidates = CandidateColumns()

    # On the event loop

    def begin(self, notes: RequestNotes, ended: EndedExchange, wall_offset_s: float) -> bytes | PendingRecord:
        """Return the line of a request, or a pending record for `end`."""
        routed = ended.routed
        features = routed.features
        if notes.body and not routed.model.policy.text_features >= TEXT_FEATURES:
            return PendingRecord(b"", notes, ended, wall_offset_s)
        document = self._document(notes, ended, features, wall_offset_s)
        is_complete = len(notes.chunks) < 2
        if is_complete and self._text != "none" and features.n == 1:
            is_complete = self._add_short(document, notes, ended)
        head = orjson.dumps(document, option=_OPTIONS)
        return head + b"\n" if is_complete else PendingRecord(head, notes, ended, wall_offset_s)

    def _add_short(self, document: dict[str, Any], notes: RequestNotes, ended: EndedExchange) -> bool:
        """Add the hashes of prompt and answer if these are short and already parsed; return whether they were added."""
        hasher, prompt, answer = self._quick_hasher, ended.routed.prompt, notes.transcript
        if hasher is None or prompt is None or answer is None or answer.token_ids:
            return False
        prompt_text, answer_text = "\n".join(prompt.pieces), answer.text
        if len(prompt_text) + len(answer_text) > _MAX_SHORT_CHARS:
            return False
        ((prompts, outputs),) = hasher.pack_all([(prompt_text, answer_text)])
        _add_hashes(document, prompts, outputs, hasher.of_texts)
        return True

    # In the recorder's thread

    def end(self, pending: Sequence[PendingRecord]) -> list[bytes | Exception]:
        """Return the line of each record, or the error that prevented it; batches are hashed three times as fast."""
        lines: list[_Line | Exception] = []
        for record in pending:
            try:
                lines.append(self._line(record))
            except Exception as error:  # noqa: BLE001 -- a defect in one record must not affect the others
                lines.append(error)
        if (hasher := self._hasher) is not None:
            _hash(lines, hasher)
        return [line if isinstance(line, Exception) else _joined(line) for line in lines]

    def _line(self, record: PendingRecord) -> _Line:
        notes, ended, head = record.notes, record.ended, record.head
        features = ended.routed.features
        body = _parsed(notes.body) if notes.body else {}
        if not head:
            all_features = _all_features(ended, body)
            head = orjson.dumps(self._document(notes, ended, all_features, record.wall_offset_s), option=_OPTIONS)
        rest: dict[str, Any] = {}
        if ended.outcome is not None and len(notes.chunks) > 1:
            rest["itl"] = _intervals(notes.chunks)
        texts = None
        if self._text != "none" and features.n == 1:
            texts = self._add_text(rest, notes, ended, body, features.endpoint)
        return _Line(head, rest, texts)

    def _document(
        self, notes: RequestNotes, ended: EndedExchange, features: RequestFeatures, wall_offset_s: float
    ) -> dict[str, Any]:
        """Return all fields of a record except its texts and the intervals of a stream."""
        document: dict[str, Any] = {
            "version": VERSION,
            "id": ended.request_id.decode("latin-1"),
            "arrived_at": micro(ended.times.arrived_s + wall_offset_s),
            "model": features.model,
            "endpoint": features.endpoint.value,
        }
        if ended.client.name:
            document["key"] = ended.client.name
        _add_features(document, features)
        document["status"] = ended.status
        if ended.label != "ok":
            document["error"] = ended.label
        document["e2e_s"] = micro(ended.times.ended_s - ended.times.arrived_s - ended.times.waited_s)
        decision, upstream = ended.decision, ended.upstream
        if decision is not None and upstream is not None:
            document["policy"] = decision.policy
            document["reason"] = decision.reason
            document["backend"] = upstream.backend.name
            document["method"] = upstream.backend.method.value
            document["propensity"] = decision.propensity
            if ended.retried_from:
                document["retried_from"] = ended.retried_from
            if ended.rescued_from:
                document["rescued_from"] = ended.rescued_from
                document["rescued_at"] = ended.rescued_at
            if notes.candidates:
                document["candidates"] = self._candidates.columns(features.model, notes, decision)
        if ended.outcome is not None:
            _add_outcome(document, ended, ended.outcome)
        return document

    def _add_text(
        self,
        document: dict[str, Any],
        notes: RequestNotes,
        ended: EndedExchange,
        body: dict[str, Any],
        endpoint: Endpoint,
    ) -> Texts | None:
        """Add the texts, or return them if they are to be hashed; without an answer that was too long to keep."""
        answer = notes.transcript
        if answer is None:
            answer = read_answer(endpoint, b"".join(notes.answer or ()), stream=True)
        prompt = ended.routed.prompt or read_prompt(body)
        prompt_ids, output_ids = _token_ids(answer.prompt_token_ids or prompt.ids), _token_ids(answer.token_ids)
        if self._text == "full":
            fields = {"prompt_token_ids": prompt_ids, "output_token_ids": output_ids, "output": answer.text}
            fields |= _prompt(endpoint, body)
            document |= {name: value for name, value in fields.items() if value}
            return None
        if prompt_ids and output_ids:
            return prompt_ids, output_ids
        return "\n".join(prompt.pieces), answer.text


def _hash(lines: Sequence[_Line | Exception], hasher: TextHasher) -> None:
    """Add the hashes of the texts to lines."""
    texts: list[tuple[str, str]] = []
    ids: list[tuple[list[int], list[int]]] = []
    of_texts: list[dict[str, Any]] = []
    of_ids: list[dict[str, Any]] = []
    for line in lines:
        if isinstance(line, Exception) or (pair := line.texts) is None:
            continue
        if isinstance(pair[0], str):
            texts.append(pair)
            of_texts.append(line.rest)
        else:
            ids.append(pair)
            of_ids.append(line.rest)
    for rest, (prompt, output) in zip(of_texts, hasher.pack_all(texts), strict=True):
        _add_hashes(rest, prompt, output, hasher.of_texts)
    for rest, (prompt, output) in zip(of_ids, hasher.pack_all_ids(ids), strict=True):
        _add_hashes(rest, prompt, output, hasher.of_tokens)


def _add_hashes(document: dict[str, Any], prompt: str, output: str, hashing: Hashing) -> None:
    """Add the packed hashes of a prompt and its answer."""
    if prompt:
        document["prompt_hashes"] = prompt
    if output:
        document["output_hashes"] = output
    document["hashing"] = hashing


def _joined(line: _Line) -> bytes:
    """Return the two parts of a line as one JSON object."""
    if not line.rest:
        return line.head + b"\n"
    return line.head[:-1] + b"," + orjson.dumps(line.rest, option=_OPTIONS)[1:] + b"\n"


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
    except orjson.JSONDecodeError:  # NaN, for example, which could not be written either
        return {}
    return document if isinstance(document, dict) else {}


def _all_features(ended: EndedExchange, body: dict[str, Any]) -> RequestFeatures:
    """Return all features of a request, including those that its policy does not use."""
    features, model = ended.routed.features, ended.routed.model
    if not body:
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


def _add_outcome(document: dict[str, Any], ended: EndedExchange, outcome: Outcome) -> None:
    usage = ended.usage
    document["prompt_tokens"] = outcome.prompt_tokens
    document["output_tokens"] = outcome.output_tokens
    if outcome.is_estimated:
        document["estimated"] = True
    if outcome.cached_tokens is not None:
        document["cached_tokens"] = outcome.cached_tokens
    if outcome.ttft_s is not None:
        document["ttft_s"] = micro(outcome.ttft_s)
    if usage is not None and usage.queue_s is not None:
        document["queue_s"] = usage.queue_s
    spec: dict[str, Any] = {}
    if outcome.drafted_tokens is not None:
        spec["drafted_tokens"] = outcome.drafted_tokens
        if usage is not None and usage.drafting_steps is not None:
            spec["drafting_steps"] = usage.drafting_steps
    if outcome.accepted_tokens is not None:
        spec["accepted_tokens"] = outcome.accepted_tokens
    lengths = {arm.partition(":")[0]: length for arm, length in outcome.shadow.items()}
    if outcome.tokens_per_step is not None:
        spec["tokens_per_step"] = micro(outcome.tokens_per_step)
        lengths[outcome.method.value] = outcome.tokens_per_step
    if spec:
        document["spec"] = spec
    if lengths:
        document["acceptance"] = {
            method: {"mean_acceptance_length": micro(length)} for method, length in lengths.items()
        }


def _intervals(chunks: array[float]) -> npt.NDArray[np.float32]:
    """Return the seconds between the chunks of a stream, at most the first `_MAX_INTERVALS`."""
    return np.diff(np.frombuffer(chunks)[: _MAX_INTERVALS + 1]).round(6).astype(np.float32)


def _prompt(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt as the field `prompt`, or as `messages` in the format of the chat API."""
    prompt, system = body.get("prompt"), body.get("system") or body.get("instructions")
    messages = body.get("messages")
    if isinstance(inputs := body.get("input"), str):
        prompt = inputs if endpoint is Endpoint.EMBEDDINGS else None
        messages = [{"role": "user", "content": inputs}]
    elif isinstance(inputs, list) and inputs and all(isinstance(item, dict) for item in inputs):
        messages = inputs
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return {}  # the engine refuses it
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def _token_ids(ids: list[int]) -> list[int]:
    """Return token ids; none if anything else is among them, which neither client nor engine has to prevent."""
    return ids if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _LARGEST_TOKEN_ID) else []
