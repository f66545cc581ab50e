"""The usage in an answer: tokens, acceptance and the engine's times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from backends.reported import MOST_CONTEXT_TOKENS, finite, whole

_NOTHING: dict[str, Any] = {}
_MOST_TOKENS: Final = MOST_CONTEXT_TOKENS << 6
"""Per request, over all its prompts and choices; `Usage.ignore_beyond` has tighter bounds."""
_MOST_S: Final = 1e6


class Usage:
    """The usage of a request as its engine reported it; None for values that were not reported.

    Examples
    --------
    >>> Usage(output_tokens=100, accepted_tokens=60, drafting_steps=20).tokens_per_step
    2.5
    """

    def __init__(
        self,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        *,
        accepted_tokens: int | None = None,
        drafting_steps: int = 0,
        audio_s: float | None = None,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache
        # drafted_tokens, accepted_tokens: draft tokens proposed, and accepted by the target model.
        self.drafted_tokens: int | None = None
        self.accepted_tokens = accepted_tokens
        self.drafting_steps = drafting_steps  # steps with a draft
        self.queue_s: float | None = None  # seconds in the engine's queue
        self.generation_s: float | None = None  # seconds of generation
        self.audio_s = audio_s  # seconds of audio that were transcribed or translated
        self.ignored = ignored  # names of impossible values, which count as not reported

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per engine step; None if the engine did not report acceptance.

        The engine's `mean_acceptance_length` omits steps without a draft. All steps are output - accepted tokens, but
        at least `drafting_steps`: the last step may accept more tokens than the answer still needs.
        """
        if self.accepted_tokens is None or not self.output_tokens:
            return None
        steps = max(self.output_tokens - self.accepted_tokens, self.drafting_steps)
        return self.output_tokens / steps if steps > 0 else None

    def ignore_beyond(self, prompt_tokens: int, output_tokens: int) -> None:
        """Ignore values that exceed these bounds on prompt and output, or contradict others.

        Examples
        --------
        >>> usage = Usage(prompt_tokens=7, output_tokens=2**50)
        >>> usage.ignore_beyond(8192, 8192)
        >>> usage.ignored, usage.output_tokens
        (('output_tokens',), None)
        """
        prompt, cached = self.prompt_tokens, self.cached_tokens
        if prompt is not None and prompt > prompt_tokens:
            self._ignore("prompt_tokens")
        if self.output_tokens is not None and self.output_tokens > output_tokens:
            self._ignore("output_tokens")
        if cached is not None and prompt is not None and cached > prompt:
            self._ignore("cached_tokens")
        if self.accepted_tokens is not None and self.accepted_tokens > output_tokens:
            self._ignore("accepted_tokens")

    def _ignore(self, name: str) -> None:
        setattr(self, name, None)
        self.ignored = (*self.ignored, name)


def read_usage(document: object) -> Usage | None:
    """Return the usage in an answer or in an event of a stream; None if there is none.

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
    ignored: list[str] = []
    prompt_tokens = _count(usage, ignored, "prompt_tokens", "input_tokens")
    output_tokens = _count(usage, ignored, "completion_tokens", "output_tokens")
    if prompt_tokens is None and (total_tokens := _count(usage, ignored, "total_tokens")) is not None:
        prompt_tokens = max(0, total_tokens - (output_tokens or 0))
    cached_tokens: int | None = None
    if "prompt_tokens" not in usage:  # Anthropic's input tokens are without those that the cache gave or keeps
        cached_tokens = _count(usage, ignored, "cache_read_input_tokens")
        if prompt_tokens is not None:
            prompt_tokens += (cached_tokens or 0) + (_count(usage, ignored, "cache_creation_input_tokens") or 0)
    found = Usage(prompt_tokens, output_tokens)
    found.cached_tokens = cached_tokens
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if isinstance(details, dict):
        found.cached_tokens = _count(details, ignored, "cached_tokens")
    metrics = document.get("metrics")
    if isinstance(metrics, dict):
        speculative = _within(metrics, "speculative_decoding")
        found.drafted_tokens = _count(speculative, ignored, "num_draft_tokens")
        found.accepted_tokens = _count(speculative, ignored, "num_accepted_draft_tokens")
        found.drafting_steps = _count(speculative, ignored, "num_spec_steps") or 0
        found.queue_s = _seconds(metrics, ignored, "queue_time_ms")
        found.generation_s = _seconds(metrics, ignored, "generation_time_ms")
    if ignored:
        found.ignored = tuple(ignored)
    return found


def first_usage(documents: Iterable[object]) -> Usage | None:
    """Return the first usage in documents, such as the last events of a stream; None if there is none."""
    return next(filter(None, map(read_usage, documents)), None)


def read_other_usage(document: object) -> Usage | None:
    """Return the usage in an answer of an endpoint that is only passed through; None if there is none.

    Besides `usage` it reads the `input_tokens` of `count_tokens`, the units that Cohere's API bills, and the seconds of
    audio: `usage.seconds`, or `duration` of a verbose answer.

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
    ignored = list(usage.ignored) if usage is not None else []
    prompt_tokens = _count(document, ignored, "input_tokens")
    if prompt_tokens is None:
        prompt_tokens = _count(billed, ignored, "input_tokens")
    audio_s = _positive(_within(document, "usage").get("seconds"))
    if audio_s is None:
        audio_s = _positive(document.get("duration"))
    if prompt_tokens is None and audio_s is None:
        return usage
    output_tokens = None if usage is None else usage.output_tokens
    return Usage(prompt_tokens, output_tokens, audio_s=audio_s, ignored=tuple(ignored))


def _positive(value: object) -> float | None:
    """Return a positive number up to a million, also from text; else None."""
    try:
        return finite(float(value) if isinstance(value, str) else value, _MOST_S) or None
    except ValueError:
        return None


def _within(document: dict[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    return value if isinstance(value, dict) else _NOTHING


def _count(document: dict[str, Any], ignored: list[str], name: str, other_name: str = "") -> int | None:
    value = document.get(name)
    if value is None and other_name:
        value = document.get(other_name)
    if value is None:
        return None
    count = whole(value, _MOST_TOKENS)
    if count is None:
        ignored.append(name)
    return count


def _seconds(document: dict[str, Any], ignored: list[str], name: str) -> float | None:
    value = document.get(name)
    if value is None:
        return None
    milliseconds = finite(value, 1e3 * _MOST_S)
    if milliseconds is None:
        ignored.append(name)
        return None
    return milliseconds / 1000.0
