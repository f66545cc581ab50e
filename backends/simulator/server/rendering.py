"""Parts common to all APIs' answers: identity, events, usage and a request's `metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

import orjson

from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.driver import Emitted, Play
from backends.simulator.server.protocol import TextBody

DONE = b"data: [DONE]\n\n"

B = TypeVar("B", bound=TextBody)


@dataclass(frozen=True, slots=True)
class RenderedReply(Generic[B]):
    """The parts of an answer to a request."""

    body: B
    answers: Sequence[ComposedAnswer]
    id: str  # id with its prefix, `chatcmpl-...`
    created: int
    model: str  # first name of the model
    fingerprint: str
    num_speculative_tokens: int  # k of the replica; 0 for a baseline

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the first fields of each object in the answer."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def end_of(self, plays: Sequence[Play]) -> dict[str, Any]:
        """Return the last fields: usage, fingerprint and, for a single choice, `metrics`."""
        fields = {"usage": usage(plays), "system_fingerprint": self.fingerprint}
        if len(plays) > 1:
            return fields
        speculation = _speculation(plays[0], self.num_speculative_tokens) if self.num_speculative_tokens else None
        return fields | {"metrics": times(plays[0]) | {"speculative_decoding": speculation}}

    def end_of_stream(self, kind: str, plays: Sequence[Play]) -> bytes:
        """Return the last events of a stream of OpenAI's older APIs."""
        if not self.body.wants_usage:
            return DONE
        return event(self.fields(kind) | {"choices": []} | self.end_of(plays)) + DONE


class Renderer(Protocol):
    """Writer of a stream."""

    def step(self, emitted: Emitted) -> bytes:
        """Return the events of one step."""

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the last events, after all choices are complete."""


def event(value: Any, name: str | None = None) -> bytes:
    r"""Return a server-sent event.

    Examples
    --------
    >>> event({"done": True}, "message_stop")
    b'event: message_stop\ndata: {"done":true}\n\n'
    """
    data = b"data: %b\n\n" % orjson.dumps(value)
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)


def tool_call_id() -> str:
    """Return a new tool call id in vLLM's format."""
    return f"chatcmpl-tool-{uuid4().hex[:16]}"


def usage(plays: Sequence[Play]) -> dict[str, Any]:
    """Return the usage of a response; a prompt shared by several choices counts once."""
    prompts = {id(play.answer.prompt_ids): play for play in plays}
    prompt = sum(len(play.answer.prompt_ids) for play in prompts.values())
    completion = sum(play.sent for play in plays)
    return running_usage(prompt, completion) | {
        "prompt_tokens_details": {"cached_tokens": sum(play.cached_tokens for play in prompts.values())},
    }


def running_usage(prompt: int, completion: int) -> dict[str, int]:
    """Return the usage of a choice so far."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def times(play: Play) -> dict[str, Any]:
    """Return the times of a request."""
    decode_s, busy_s = play.last_s - play.first_s, play.last_s - play.scheduled_s
    return {
        "time_to_first_token_ms": (play.first_s - play.scheduled_s) * 1e3,
        "generation_time_ms": decode_s * 1e3,
        "queue_time_ms": max(0.0, play.scheduled_s - play.arrived_s) * 1e3,
        "mean_itl_ms": decode_s * 1e3 / (play.sent - 1) if play.sent > 1 else None,
        "tokens_per_second": play.sent / busy_s if busy_s > 0 else None,
    }


def _speculation(play: Play, k: int) -> dict[str, Any]:
    steps, accepted, drafted = len(play.drafted), sum(play.accepted), sum(play.drafted)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [play.accepted.count(length) for length in range(k + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": k,
    }
