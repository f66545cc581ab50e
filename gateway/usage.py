"""What an answer says of its own cost: tokens, acceptance, the engine's times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's own account of a request; None where it gave none.

    Parameters
    ----------
    drafted_tokens, accepted_tokens
        Of the speculation.
    drafting_steps
        Steps that drafted anything.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    drafting_steps: int = 0
    ttft_s: float | None = None
    queue_s: float | None = None
    generation_s: float | None = None

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per engine step; None if the engine did not report its acceptance.

        The engine's own `mean_acceptance_length` leaves out the steps that drafted nothing. All steps together are
        output - accepted, but no fewer than those that drafted: a last step may accept more than was left to answer.
        """
        if self.accepted_tokens is None or not self.output_tokens:
            return None
        steps = max(self.output_tokens - self.accepted_tokens, self.drafting_steps)
        return self.output_tokens / steps if steps > 0 else None


def read_usage(document: object) -> Usage | None:
    """Read the usage of an answer, or of the event of a stream that carries it.

    Parameters
    ----------
    document
        A chat, completions, messages or embeddings answer or chunk, a responses answer, or the event
        `response.completed` around one.

    Returns
    -------
    Usage or None
        None if there is none in it.
    """
    if not isinstance(document, Mapping):
        return None
    nested = document.get("response")
    if isinstance(nested, Mapping):
        document = nested
    usage = document.get("usage")
    if not isinstance(usage, Mapping):
        return None
    metrics = document.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    speculative = metrics.get("speculative_decoding")
    speculative = speculative if isinstance(speculative, Mapping) else {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    details = details if isinstance(details, Mapping) else {}
    return Usage(
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        output_tokens=_count(usage, "completion_tokens", "output_tokens"),
        cached_tokens=_count(details, "cached_tokens"),
        drafted_tokens=_count(speculative, "num_draft_tokens"),
        accepted_tokens=_count(speculative, "num_accepted_draft_tokens"),
        drafting_steps=_count(speculative, "num_spec_steps") or 0,
        ttft_s=_seconds(metrics, "time_to_first_token_ms"),
        queue_s=_seconds(metrics, "queue_time_ms"),
        generation_s=_seconds(metrics, "generation_time_ms"),
    )


def _count(document: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = document.get(name)
        if isinstance(value, int) and value >= 0:
            return value
    return None


def _seconds(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    return value / 1000.0 if isinstance(value, int | float) and value >= 0 else None
