"""The usage in an answer: tokens, acceptance and the engine's times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_NOTHING: dict[str, Any] = {}


@dataclass(slots=True, init=False)
class Usage:
    """The usage of a request as its engine reported it; None for values that were not reported.

    Parameters
    ----------
    cached_tokens
        Prompt tokens found in the prefix cache.
    drafted_tokens, accepted_tokens
        Draft tokens proposed, and accepted by the target model.
    drafting_steps
        Steps with a draft.
    ttft_s, queue_s, generation_s
        Seconds to the first token, in the engine's queue, and of generation.
    audio_s
        Seconds of audio that were transcribed or translated.

    Examples
    --------
    >>> Usage(output_tokens=100, accepted_tokens=60, drafting_steps=20).tokens_per_step
    2.5
    """

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    drafting_steps: int
    ttft_s: float | None
    queue_s: float | None
    generation_s: float | None
    audio_s: float | None

    def __init__(  # noqa: PLR0917 -- a record
        self,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        drafted_tokens: int | None = None,
        accepted_tokens: int | None = None,
        drafting_steps: int = 0,
        ttft_s: float | None = None,
        queue_s: float | None = None,
        generation_s: float | None = None,
        audio_s: float | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens
        self.drafted_tokens = drafted_tokens
        self.accepted_tokens = accepted_tokens
        self.drafting_steps = drafting_steps
        self.ttft_s = ttft_s
        self.queue_s = queue_s
        self.generation_s = generation_s
        self.audio_s = audio_s

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per engine step; None if the engine did not report acceptance.

        The engine's `mean_acceptance_length` omits steps without a draft. The number of all steps is output - accepted
        tokens, but at least `drafting_steps`: the last step may accept more tokens than the answer still needs.
        """
        if self.accepted_tokens is None or not self.output_tokens:
            return None
        steps = max(self.output_tokens - self.accepted_tokens, self.drafting_steps)
        return self.output_tokens / steps if steps > 0 else None


def read_usage(document: object) -> Usage | None:
    """Return the usage in an answer or in an event of a stream; None if there is none.

    Parameters
    ----------
    document
        A chat, completions, messages or embeddings answer or chunk, a responses answer, or its event
        `response.completed`.

    Examples
    --------
    >>> read_usage({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}).output_tokens
    3
    """
    if not isinstance(document, dict):
        return None
    if isinstance(nested := document.get("response"), dict):
        document = nested
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return None
    metrics = _within(document, "metrics")
    speculative = _within(metrics, "speculative_decoding")
    details = _within(usage, "prompt_tokens_details") or _within(usage, "input_tokens_details")
    prompt_tokens = _count(usage, "prompt_tokens", "input_tokens")
    output_tokens = _count(usage, "completion_tokens", "output_tokens")
    if prompt_tokens is None and (total_tokens := _count(usage, "total_tokens")) is not None:
        prompt_tokens = max(0, total_tokens - (output_tokens or 0))
    return Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=_count(details, "cached_tokens"),
        drafted_tokens=_count(speculative, "num_draft_tokens"),
        accepted_tokens=_count(speculative, "num_accepted_draft_tokens"),
        drafting_steps=_count(speculative, "num_spec_steps") or 0,
        ttft_s=_seconds(metrics, "time_to_first_token_ms"),
        queue_s=_seconds(metrics, "queue_time_ms"),
        generation_s=_seconds(metrics, "generation_time_ms"),
    )


def first_usage(documents: Iterable[object]) -> Usage | None:
    """Return the first usage in some documents, as of the last events of a stream; None if there is none."""
    return next(filter(None, map(read_usage, documents)), None)


def read_other_usage(document: object) -> Usage | None:
    """Return the usage in an answer of an endpoint that is only passed through; None if there is none.

    Besides `usage` it reads what `count_tokens` answers (`input_tokens`), the units that Cohere's API bills, and the
    seconds of audio: `usage.seconds`, or `duration` of a verbose answer.

    Examples
    --------
    >>> read_other_usage({"input_tokens": 9}).prompt_tokens, read_other_usage({"usage": {"seconds": 3}}).audio_s
    (9, 3.0)
    """
    if not isinstance(document, dict):
        return None
    usage = read_usage(document)
    if usage is not None and usage.prompt_tokens is not None:
        return usage
    billed = _within(_within(document, "meta"), "billed_units")
    prompt_tokens = _count(document, "input_tokens")
    if prompt_tokens is None:
        prompt_tokens = _count(billed, "input_tokens")
    audio_s = _positive(_within(document, "usage").get("seconds"))
    if audio_s is None:
        audio_s = _positive(document.get("duration"))
    if prompt_tokens is None and audio_s is None:
        return usage
    output_tokens = None if usage is None else usage.output_tokens
    return Usage(prompt_tokens, output_tokens, audio_s=audio_s)


def _positive(value: object) -> float | None:
    """Return a positive number up to a million, also from text; else None."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else 0.0
    except ValueError:
        return None
    return number if 0.0 < number < 1e6 else None


def _within(document: dict[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    return value if isinstance(value, dict) else _NOTHING


def _count(document: dict[str, Any], name: str, other_name: str = "") -> int | None:
    value = document.get(name)
    if value is None and other_name:
        value = document.get(other_name)
    return value if isinstance(value, int) and value >= 0 else None


def _seconds(document: dict[str, Any], name: str) -> float | None:
    value = document.get(name)
    # `int | float` would be built on each call.
    return value / 1000.0 if isinstance(value, (int, float)) and value >= 0 else None
