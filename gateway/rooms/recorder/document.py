"""The record of a finished request: one line of JSON (docs/replay.md)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from backends.backend import Backend, EngineLoad
from gateway.dialects.json_body import decoded_body
from gateway.dialects.transcript import Transcript, read_answer, read_document
from gateway.relay.observers import EndedExchange, Observer
from gateway.rooms.recorder.hashes import TextHasher
from gateway.rooms.recorder.schema import VERSION, Hashing
from policies.features.prompt import read_prompt
from policies.features.request import TEXT_FEATURES, Endpoint, RequestFeatures, describe
from policies.policy import Decision, Outcome

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_MAX_INTERVALS = 8192
_LARGEST_TOKEN_ID = 2**32 - 1
_MAX_SHORT_CHARS = 4096
"""Largest prompt and answer hashed on the event loop: a few microseconds if all units were seen before, half a
millisecond if none."""
_ID_BYTES = 40
_CHARACTER_BYTES = 4  # at most
_MILLION = 1e6


def micro(value: float) -> float:
    """Return a number rounded to a millionth; ten times as fast as `round`."""
    return int(value * _MILLION + 0.5) / _MILLION if 0.0 <= value < 1e9 * 9 else round(value, 6)


class RequestNotes(Observer):
    """What the record of one request needs but cannot be determined after its end."""

    head: bytes  # part of the line built on the event loop; empty if that needs the request's body
    ended: EndedExchange
    wall_offset_s: float  # seconds since 1970 at which `time.perf_counter` was 0

    def __init__(
        self,
        record: Callable[[RequestNotes, EndedExchange], None],
        body: bytes = b"",
        *,
        keeps_answer: bool,
        max_bytes: int = 0,
    ) -> None:
        self._record = record  # called with the notes and the ended exchange
        self._max_bytes = self._remaining_bytes = max_bytes
        self.body = body  # body of the request, if the record needs more of it than the features; else empty
        # The bytes of a stream; None if answers are not kept, or this one was too long.
        self.answer: list[bytes] | None = [] if keeps_answer else None
        self.transcript: Transcript | None = None  # the text of an answer in one piece
        # The candidates of its last decision, and their requests in flight and loads at that time.
        self.candidates: Sequence[Backend] = ()
        self.in_flight: list[int] = []
        self.loads: list[EngineLoad] = []
        # Arrival of the first `_MAX_INTERVALS + 1` chunks of the stream, by `time.perf_counter`.
        self.chunks: array[float] = array("d")
        self._document: object = None

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Store the candidates of a decision and their loads."""
        self.candidates = candidates
        self.in_flight = [backend.in_flight for backend in candidates]
        self.loads = [backend.load for backend in candidates]

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Record when a chunk of a stream arrived, and keep the chunk if answers are recorded."""
        if len(self.chunks) <= _MAX_INTERVALS:
            self.chunks.append(now_s)
        if self._has_room(data) and self.answer is not None:
            self.answer.append(data)

    def on_answer(self, body: bytes, document: object) -> None:
        """Keep an answer in one piece, if answers are kept."""
        if self._has_room(body):
            self._document = document

    def on_end(self, ended: EndedExchange) -> None:
        """Record the request."""
        document, self._document = self._document, None
        if isinstance(document, dict):
            self.transcript = read_document(ended.routed.features.endpoint, document)
        self._record(self, ended)

    def _has_room(self, data: bytes) -> bool:
        if self.answer is None:
            return False
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            self.answer = None
        return self._remaining_bytes >= 0

    @property
    def size_bytes(self) -> int:
        """Estimated memory of what it holds, once `begin` was called."""
        held = len(self.head) + len(self.body) + self.chunks.itemsize * len(self.chunks)
        if (prompt := self.ended.routed.prompt) is not None:
            held += _size_bytes(prompt.pieces, prompt.ids)
        if (transcript := self.transcript) is not None:
            held += _size_bytes(transcript.pieces, transcript.token_ids)
        elif self.answer is not None:
            held += self._max_bytes - self._remaining_bytes
        return held


class RecordBuilder:
    """Builds the lines of finished requests: on the event loop if that is quick, else partly in the recorder's thread.

    When a request ends, its data is still in the processor's caches and can be released immediately. Unless long texts
    must be read, building its record then is cheaper than later in a thread.
    """

    def __init__(self, text: str, hasher: TextHasher | None = None, quick_hasher: TextHasher | None = None) -> None:
        self._text = text  # `none`, `hashes` or `full`
        self._hasher = hasher  # hashes texts in the thread; None without hashes
        # Hashes short texts on the event loop: a separate one, since hashers are not thread-safe. None leaves all texts
        # to the thread.
        self._quick_hasher = quick_hasher
        # Loads change once a second, so columns are cached: by model, those of the last request, and their loads.
        self._loads: dict[str, tuple[list[EngineLoad], dict[str, Any]]] = {}

    # On the event loop

    def begin(self, notes: RequestNotes, ended: EndedExchange, wall_offset_s: float) -> bytes | None:
        """Return the line of a request; None if `end` must complete it."""
        notes.head, notes.ended, notes.wall_offset_s = b"", ended, wall_offset_s
        routed = ended.routed
        if notes.body and not routed.model.policy.text_features >= TEXT_FEATURES:
            return None
        document = self._document(notes, routed.features)
        is_complete = len(notes.chunks) < 2
        if is_complete and self._text != "none" and routed.features.n == 1:
            is_complete = self._add_short(document, notes)
        head = orjson.dumps(document, option=_OPTIONS)
        if is_complete:
            return head + b"\n"
        notes.head = head
        return None

    def _add_short(self, document: dict[str, Any], notes: RequestNotes) -> bool:
        """Add the hashes of prompt and answer if these are short and already parsed; return whether they were added."""
        hasher, prompt, answer = self._quick_hasher, notes.ended.routed.prompt, notes.transcript
        if hasher is None or prompt is None or answer is None or answer.token_ids:
            return False
        prompt_text, answer_text = "\n".join(prompt.pieces), answer.text
        if len(prompt_text) + len(answer_text) > _MAX_SHORT_CHARS:
            return False
        _add_hashes(document, hasher.pack(prompt_text, answer_text), hasher.of_texts)
        return True

    # In the recorder's thread

    def end(self, notes: RequestNotes) -> bytes:
        """Return the line of a request."""
        ended, head = notes.ended, notes.head
        features = ended.routed.features
        body = _parsed(notes.body)
        if not head:
            head = orjson.dumps(self._document(notes, _all_features(ended, body)), option=_OPTIONS)
        rest: dict[str, Any] = {}
        if ended.outcome is not None and len(notes.chunks) > 1:
            rest["itl"] = _intervals(notes.chunks)
        if self._text != "none" and features.n == 1:
            self._add_text(rest, notes, body, features.endpoint)
        if not rest:
            return head + b"\n"
        return head[:-1] + b"," + orjson.dumps(rest, option=_OPTIONS)[1:] + b"\n"

    def _add_text(
        self, document: dict[str, Any], notes: RequestNotes, body: dict[str, Any], endpoint: Endpoint
    ) -> None:
        """Add the texts or their hashes; an answer that was too long to keep is left out."""
        answer = notes.transcript
        if answer is None:
            answer = read_answer(endpoint, b"".join(notes.answer or ()), stream=True)
        prompt, hasher = notes.ended.routed.prompt or read_prompt(body), self._hasher
        prompt_ids, output_ids = _token_ids(answer.prompt_token_ids or prompt.ids), _token_ids(answer.token_ids)
        if hasher is None:
            fields = {"prompt_token_ids": prompt_ids, "output_token_ids": output_ids, "output": answer.text}
            fields |= _prompt(endpoint, body)
            document |= {name: value for name, value in fields.items() if value}
        elif prompt_ids and output_ids:
            _add_hashes(document, hasher.pack_ids(prompt_ids, output_ids), hasher.of_tokens)
        else:
            _add_hashes(document, hasher.pack("\n".join(prompt.pieces), answer.text), hasher.of_texts)

    # On both

    def _document(self, notes: RequestNotes, features: RequestFeatures) -> dict[str, Any]:
        """Return all fields of a record except its texts and the intervals of a stream."""
        ended = notes.ended
        document: dict[str, Any] = {
            "version": VERSION,
            "id": ended.request_id.decode("latin-1"),
            "arrived_at": micro(ended.arrived_s + notes.wall_offset_s),
            "model": features.model,
            "endpoint": str(features.endpoint),
        }
        if ended.client.name:
            document["key"] = ended.client.name
        _add_features(document, features)
        document["status"] = ended.status
        if ended.label != "ok":
            document["error"] = ended.label
        if ended.waited_s:
            document["waited_s"] = micro(ended.waited_s)
        document["e2e_s"] = micro(ended.ended_s - ended.arrived_s - ended.waited_s)
        decision, upstream = ended.decision, ended.upstream
        if decision is not None and upstream is not None:
            document["policy"] = decision.policy
            document["reason"] = decision.reason
            document["backend"] = upstream.backend.name
            document["method"] = str(upstream.backend.method)
            document["propensity"] = decision.propensity
            if decision.arm:
                document["arm"] = decision.arm
            if ended.retried_from:
                document["retried_from"] = ended.retried_from
            if ended.rescued_from:
                document["rescued_from"] = ended.rescued_from
                document["rescued_at"] = ended.rescued_at
            if notes.candidates:
                document["candidates"] = self._columns(features.model, notes, decision)
        if ended.outcome is not None:
            _add_outcome(document, ended, ended.outcome)
        return document

    def _columns(self, model: str, notes: RequestNotes, decision: Decision) -> dict[str, Any]:
        """Return the candidates of a decision with their loads, predictions and propensities: one list per field."""
        candidates = notes.candidates
        columns: dict[str, Any] = {"backend": [backend.name for backend in candidates]}
        if not decision.candidates:
            columns["propensity"] = _implied(candidates, decision)
        elif decision.candidates is candidates:
            columns["prediction_s"] = [None if one is None else micro(one) for one in decision.predicted_s]
            columns["propensity"] = decision.propensities
        else:  # the policy excluded some candidates, or another arm's choice is unknown
            names, others = [each.name for each in decision.candidates], 0.0 if decision.arm_chance >= 1.0 else None
            predicted, propensities = (
                dict(zip(names, each, strict=True)) for each in (decision.predicted_s, decision.propensities)
            )
            found = [predicted.get(backend.name) for backend in candidates]
            columns["prediction_s"] = [None if one is None else micro(one) for one in found]
            columns["propensity"] = [propensities.get(backend.name, others) for backend in candidates]
        columns["in_flight"] = notes.in_flight
        columns |= self._loads_of(model, notes.loads)
        return columns

    def _loads_of(self, model: str, loads: list[EngineLoad]) -> dict[str, Any]:
        cached = self._loads.get(model)
        if cached is not None and cached[0] == loads:
            return cached[1]
        columns: dict[str, Any] = {}
        if any(load.at_s for load in loads):
            columns["running"] = [load.running if load.at_s else None for load in loads]
            columns["waiting"] = [load.waiting if load.at_s else None for load in loads]
        self._loads[model] = loads, columns
        return columns


def _implied(candidates: Sequence[Backend], decision: Decision) -> list[float | None]:
    """Return the propensities that follow from the chosen backend's, the only one the policy reports."""
    chosen, others = decision.propensity, None
    if chosen >= 1.0 or len(candidates) == 2:
        others = micro(1.0 - chosen)
    return [chosen if backend.name == decision.backend else others for backend in candidates]


def _size_bytes(texts: list[str], ids: list[int]) -> int:
    size = _ID_BYTES * len(ids)
    for text in texts:
        size += len(text) if text.isascii() else _CHARACTER_BYTES * len(text)
    return size


def _add_hashes(document: dict[str, Any], packed: list[str], hashing: Hashing) -> None:
    """Add the packed hashes of a prompt and its answer."""
    prompt, output = packed
    if prompt:
        document["prompt_hashes"] = prompt
    if output:
        document["output_hashes"] = output
    document["hashing"] = hashing


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
    if (unseen := features.unseen) is not None:
        document["parts"], document["unknown"] = dict(unseen.parts), unseen.unknown
    document["output_tokens"] = 0
    document["turns"] = features.turns
    document["overlap"] = micro(features.overlap)
    document["code_share"] = micro(features.code_share)
    if features.structured:
        document["structured"] = True
    if features.tools:
        document["tools"] = True
    if features.thinking is not None:
        document["thinking"] = features.thinking
    if features.baseline_only:
        document["baseline_only"] = features.baseline_only
    document["qps"] = micro(features.qps)
    document["in_flight"] = features.in_flight


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = decoded_body(body) if body else {}
    except orjson.JSONDecodeError:  # such as NaN, which could not be written either
        return {}
    return document if isinstance(document, dict) else {}


def _all_features(ended: EndedExchange, body: dict[str, Any]) -> RequestFeatures:
    """Return all features of a request, including those that its policy does not use."""
    features, model = ended.routed.features, ended.routed.model
    if not body:
        return features
    same = {name: getattr(features, name) for name in ("model", "qps", "in_flight", "workload")}
    found = describe(features.endpoint, body, default_temperature=model.default_temperature, **same)
    found.prompt_tokens, found.unseen = features.prompt_tokens, features.unseen  # as known then
    return found


def _add_outcome(document: dict[str, Any], ended: EndedExchange, outcome: Outcome) -> None:
    usage = ended.usage
    document["prompt_tokens"] = outcome.prompt_tokens
    document["output_tokens"] = outcome.output_tokens
    if outcome.is_estimated:
        document["estimated"] = True
    if outcome.cached_tokens is not None:
        document["cached_tokens"] = outcome.cached_tokens
    if outcome.decision.cached_by:
        document["expected_cached_tokens"] = outcome.decision.cached_tokens
        document["cached_by"] = outcome.decision.cached_by
    if outcome.ttft_s is not None:
        document["ttft_s"] = micro(outcome.ttft_s)
    if usage is not None and usage.queue_s is not None:
        document["queue_s"] = usage.queue_s
    spec: dict[str, Any] = {}
    if outcome.drafted_tokens is not None:
        spec["drafted_tokens"] = outcome.drafted_tokens
        if usage is not None:
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
        document["acceptance"] = {way: {"mean_acceptance_length": micro(length)} for way, length in lengths.items()}


def _intervals(chunks: array[float]) -> npt.NDArray[np.float32]:
    """Return the seconds between the chunks of a stream."""
    return np.diff(np.frombuffer(chunks)).round(6).astype(np.float32)


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
        return {}  # the engine rejects it
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def _token_ids(ids: list[int]) -> list[int]:
    """Return token ids; none if any is invalid, since neither client nor engine guarantees them."""
    return ids if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _LARGEST_TOKEN_ID) else []
