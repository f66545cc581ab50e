"""The record of a request that has ended: one line of JSON, as docs/trace.md has it."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.recorder.hashes import TextHasher
from gateway.recorder.take import Taken
from gateway.transcript import read_answer
from policies.policy import Decision
from policies.prompt import read_prompt
from policies.request import TEXT_FEATURES, Endpoint, RequestFeatures, describe
from policies.trace import VERSION

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_MOST_INTERVALS = 8192
_DIGITS = 6  # of times: a microsecond


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

    def line(self, taken: Taken, wall_offset_s: float) -> bytes:
        """Return the line of a request.

        Parameters
        ----------
        wall_offset_s
            Seconds since 1970 when the clock of `time.perf_counter` showed 0.
        """
        body = _parsed(taken.body)
        features = _complete(taken, body)
        document: dict[str, Any] = {
            "version": VERSION,
            "id": taken.request_id.decode("latin-1"),
            "arrived_at": round(taken.arrived_s + wall_offset_s, _DIGITS),
            "model": features.model,
            "endpoint": features.endpoint,
            "key": taken.key,
            "template": features.template,
            "workload": features.workload,
            "temperature": features.temperature,
            "top_p": features.top_p,
            "max_tokens": features.max_tokens,
            "n": features.n,
            "stream": features.stream,
            "prompt_tokens": features.prompt_tokens,
            "output_tokens": 0,
            "turns": features.turns,
            "overlap": round(features.overlap, 4),
            "code_share": round(features.code_share, 4),
            "structured": features.structured,
            "tools": features.tools,
            "baseline_only": features.baseline_only,
            "qps": round(features.qps, 3),
            "in_flight": features.in_flight,
            "status": taken.status,
            "error": "" if taken.word == "ok" else taken.word,
            "e2e_s": round(taken.ended_s - taken.arrived_s, _DIGITS),
        }
        if taken.decision is not None and taken.backend is not None:
            document |= {
                "policy": taken.decision.policy,
                "reason": taken.decision.reason,
                "backend": taken.backend.name,
                "method": taken.backend.method.value,
                "propensity": taken.decision.propensity,
                "retried_from": taken.retried_from,
                "candidates": _candidates(taken, taken.decision),
            }
        if taken.outcome is not None:
            _add_outcome(document, taken)
        if self._text != "none" and features.n == 1:
            self._add_text(document, taken, body, features)
        return orjson.dumps({name: value for name, value in document.items() if _is_told(value)}, option=_OPTIONS)

    def _add_text(
        self, document: dict[str, Any], taken: Taken, body: dict[str, Any], features: RequestFeatures
    ) -> None:
        """Add the text, or what stands for it: of a prompt alone if the answer was too long to keep."""
        parts = taken.take.answer or []
        answer = read_answer(features.endpoint, b"".join(parts), stream=bool(taken.take.chunks))
        prompt = read_prompt(body)
        prompt_ids, output_ids = answer.prompt_token_ids or prompt.ids, answer.token_ids
        if self._text == "full":
            document |= {
                "prompt_token_ids": prompt_ids,
                "output_token_ids": output_ids,
                "output": answer.text,
                **_prompt(features.endpoint, body),
            }
            return
        assert self._hasher is not None
        if prompt_ids and output_ids:
            prompts, outputs, how = self._hasher.hash_ids(prompt_ids, output_ids)
        else:
            prompts, outputs, how = self._hasher.hash_text("\n".join(prompt.pieces), answer.text)
        document |= {"prompt_hashes": prompts, "output_hashes": outputs, "hashing": how}


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


def _candidates(taken: Taken, decision: Decision) -> list[dict[str, Any]]:
    """Return what the policy thought of each candidate; where it does not say, what follows from its choice."""
    considered = {one.backend: one for one in decision.considered}
    certain = decision.propensity >= 1.0
    told = []
    for backend, in_flight, load in taken.take.candidates:
        one: dict[str, Any] = {"backend": backend.name, "method": backend.method.value}
        thought = considered.get(backend.name)
        if thought is not None:
            if thought.predicted_s is not None:
                one["prediction_s"] = round(thought.predicted_s, _DIGITS)
            one["propensity"] = thought.propensity
        elif backend.name == decision.backend:
            one["propensity"] = decision.propensity
        elif certain or len(taken.take.candidates) == 2:
            one["propensity"] = round(1.0 - decision.propensity, _DIGITS)
        one["in_flight"] = in_flight
        if load.at_s:
            one["running"], one["waiting"] = load.running, load.waiting
        told.append(one)
    return told


def _add_outcome(document: dict[str, Any], taken: Taken) -> None:
    outcome, usage = taken.outcome, taken.usage
    assert outcome is not None
    spec = {
        "drafted_tokens": outcome.drafted_tokens,
        "accepted_tokens": outcome.accepted_tokens,
        "drafting_steps": None if usage is None or outcome.drafted_tokens is None else usage.drafting_steps,
        "tokens_per_step": None if outcome.tokens_per_step is None else round(outcome.tokens_per_step, 4),
    }
    document |= {
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens,
        "ttft_s": None if outcome.ttft_s is None else round(outcome.ttft_s, _DIGITS),
        "itl": _intervals(taken.take.chunks),
        "queue_s": None if usage is None else usage.queue_s,
        "spec": {name: value for name, value in spec.items() if value is not None},
    }
    steps = {arm.partition(":")[0]: round(length, 4) for arm, length in outcome.lookups.items()}
    if outcome.tokens_per_step is not None:
        steps[outcome.method.value] = round(outcome.tokens_per_step, 4)
    document["acceptance"] = {method: {"mean_acceptance_length": length} for method, length in steps.items()}


def _intervals(chunks: array[float]) -> npt.NDArray[np.float32]:
    """Return the seconds between chunks; of an endless stream, the first of them."""
    return np.diff(np.frombuffer(chunks)[: _MOST_INTERVALS + 1]).round(_DIGITS).astype(np.float32)


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


def _is_told(value: object) -> bool:
    if value is None or value is False:
        return False
    return not hasattr(value, "__len__") or len(value) > 0
