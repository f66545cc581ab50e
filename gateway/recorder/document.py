"""The record of a request that has ended: one line of JSON, as docs/trace.md has it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.http.transcript import read_answer
from gateway.recorder.candidates import CandidateColumns
from gateway.recorder.hashes import TextHasher
from gateway.recorder.rounding import micro
from gateway.recorder.schema import VERSION, Hashing
from gateway.recorder.take import FinishedRequest
from policies.features.prompt import read_prompt
from policies.features.request import TEXT_FEATURES, Endpoint, RequestFeatures, describe
from policies.policy import Outcome

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_MOST_INTERVALS = 8192
_SHORT = 4096
"""Characters of a prompt and its answer, all of which hashing takes a few microseconds if they were seen before, and
half a millisecond if not."""

Texts = tuple[str, str] | tuple[list[int], list[int]]
"""Of a prompt and its answer, or their token ids."""


class Waiting:
    """A request that has ended, and that has more to it than is worked out on the event loop.

    Parameters
    ----------
    head
        The beginning of its line, everything that was at hand; empty if that wants its body.
    wall_offset_s
        Seconds since 1970 when the clock of `time.perf_counter` showed 0.
    size_bytes
        What it holds until then.
    """

    __slots__ = ("head", "size_bytes", "taken", "wall_offset_s")

    def __init__(self, head: bytes, taken: FinishedRequest, wall_offset_s: float) -> None:
        self.head = head
        self.taken = taken
        self.wall_offset_s = wall_offset_s
        self.size_bytes = len(head) + taken.held_bytes()


class _Line:
    """A line without its end, and what is yet to be hashed for it."""

    __slots__ = ("head", "rest", "texts")

    def __init__(self, head: bytes, rest: dict[str, Any], texts: Texts | None) -> None:
        self.head = head
        self.rest = rest
        self.texts = texts


class Documents:
    """Makes lines of what was taken, whole ones at once if that is soon done.

    What a record is made of is in the processor's caches when its request ends, and all of it can be let go then. So
    that is cheaper than it would be a while later, even in a thread of its own, as long as nothing long is to be read.

    Parameters
    ----------
    text
        `none`, `hashes` or `full`.
    hasher
        Makes the hashes, where they are wanted.
    quick_hasher
        Makes those of short texts on the event loop: another one, for a hasher does one thing at a time. None leaves
        them to the thread.
    """

    def __init__(self, text: str, hasher: TextHasher | None = None, quick_hasher: TextHasher | None = None) -> None:
        self._text = text
        self._hasher = hasher
        self._quick_hasher = quick_hasher
        self._candidates = CandidateColumns()

    # On the event loop.

    def begin(self, taken: FinishedRequest, wall_offset_s: float) -> bytes | Waiting:
        """Return the line of a request, or what `end` makes its line of.

        Parameters
        ----------
        wall_offset_s
            Seconds since 1970 when the clock of `time.perf_counter` showed 0.
        """
        routed = taken.routed
        features = routed.features
        if taken.body and not routed.model.policy.text_features >= TEXT_FEATURES:
            return Waiting(b"", taken, wall_offset_s)
        document = self._document(taken, features, wall_offset_s)
        is_whole = len(taken.take.chunks) < 2
        if is_whole and self._text != "none" and features.n == 1:
            is_whole = self._add_short(document, taken)
        head = orjson.dumps(document, option=_OPTIONS)
        return head + b"\n" if is_whole else Waiting(head, taken, wall_offset_s)

    def _add_short(self, document: dict[str, Any], taken: FinishedRequest) -> bool:
        """Add the hashes of texts that are short and at hand, and tell whether they are."""
        hasher, prompt, answer = self._quick_hasher, taken.routed.prompt, taken.take.transcript
        if hasher is None or prompt is None or answer is None or answer.token_ids:
            return False
        asked, answered = "\n".join(prompt.pieces), answer.text
        if len(asked) + len(answered) > _SHORT:
            return False
        ((prompts, outputs),) = hasher.pack_all([(asked, answered)])
        _add_hashes(document, prompts, outputs, hasher.of_texts)
        return True

    # In the recorder's thread.

    def end(self, waiting: Sequence[Waiting]) -> list[bytes | Exception]:
        """Return lines, or why one cannot be made; hashing the texts of many at once takes a third of the time."""
        lines: list[_Line | Exception] = []
        for one in waiting:
            try:
                lines.append(self._line(one))
            except Exception as error:  # noqa: BLE001 -- a record that cannot be made must not end all others
                lines.append(error)
        if (hasher := self._hasher) is not None:
            _hash(lines, hasher)
        return [line if isinstance(line, Exception) else _whole(line) for line in lines]

    def _line(self, waiting: Waiting) -> _Line:
        taken, head = waiting.taken, waiting.head
        features = taken.routed.features
        body = _parsed(taken.body) if taken.body else {}
        if not head:
            head = orjson.dumps(self._document(taken, _described(taken, body), waiting.wall_offset_s), option=_OPTIONS)
        rest: dict[str, Any] = {}
        if taken.outcome is not None and len(taken.take.chunks) > 1:
            rest["itl"] = _intervals(taken.take.chunks)
        texts = None
        if self._text != "none" and features.n == 1:
            texts = self._add_text(rest, taken, body, features.endpoint)
        return _Line(head, rest, texts)

    def _document(self, taken: FinishedRequest, features: RequestFeatures, wall_offset_s: float) -> dict[str, Any]:
        """Return everything of a record but its texts, and the intervals of a stream."""
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
        return document

    def _add_text(
        self, document: dict[str, Any], taken: FinishedRequest, body: dict[str, Any], endpoint: Endpoint
    ) -> Texts | None:
        """Add the text, or return what is to stand for it: of a prompt alone if the answer was too long to keep."""
        answer = taken.take.transcript
        if answer is None:
            answer = read_answer(endpoint, b"".join(taken.take.answer or ()), stream=True)
        prompt = taken.routed.prompt or read_prompt(body)
        prompt_ids, output_ids = answer.prompt_token_ids or prompt.ids, answer.token_ids
        if self._text == "full":
            told = {"prompt_token_ids": prompt_ids, "output_token_ids": output_ids, "output": answer.text}
            told |= _prompt(endpoint, body)
            document |= {name: text for name, text in told.items() if text}
            return None
        if prompt_ids and output_ids:
            return prompt_ids, output_ids
        return "\n".join(prompt.pieces), answer.text


def _hash(lines: Sequence[_Line | Exception], hasher: TextHasher) -> None:
    """Add what stands for the texts of lines."""
    texts: list[tuple[str, str]] = []
    ids: list[tuple[list[int], list[int]]] = []
    of_texts: list[dict[str, Any]] = []
    of_ids: list[dict[str, Any]] = []
    for line in lines:
        if isinstance(line, Exception) or (both := line.texts) is None:
            continue
        if isinstance(both[0], str):
            texts.append(both)
            of_texts.append(line.rest)
        else:
            ids.append(both)
            of_ids.append(line.rest)
    for rest, (prompt, output) in zip(of_texts, hasher.pack_all(texts), strict=True):
        _add_hashes(rest, prompt, output, hasher.of_texts)
    for rest, (prompt, output) in zip(of_ids, hasher.pack_all_ids(ids), strict=True):
        _add_hashes(rest, prompt, output, hasher.of_tokens)


def _add_hashes(document: dict[str, Any], prompt: str, output: str, how: Hashing) -> None:
    """Add the hashes of a prompt and its answer: 24 bits a unit, packed into a text."""
    if prompt:
        document["prompt_hashes"] = prompt
    if output:
        document["output_hashes"] = output
    document["hashing"] = how


def _whole(line: _Line) -> bytes:
    """Return a line with its end."""
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
    except orjson.JSONDecodeError:  # NaN and the like, which `json` takes: such a text could not be written either
        return {}
    return document if isinstance(document, dict) else {}


def _described(taken: FinishedRequest, body: dict[str, Any]) -> RequestFeatures:
    """Return the features of a request, those too that its policy had no need of."""
    features, model = taken.routed.features, taken.routed.model
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


def _add_outcome(document: dict[str, Any], taken: FinishedRequest, outcome: Outcome) -> None:
    usage = taken.usage
    document["prompt_tokens"] = outcome.prompt_tokens
    document["output_tokens"] = outcome.output_tokens
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
    steps = {arm.partition(":")[0]: length for arm, length in outcome.shadow.items()}
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
