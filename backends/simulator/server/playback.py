"""An answer while the engine plays it, and the `metrics` and `usage` of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.drafting.script import BLOCK_TOKENS, Script
from backends.simulator.server.answer import Answer


class TokenListener(Protocol):
    """Receiver of the tokens that the engine emits."""

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Handle the output tokens from `start` to `end` of one step; after the last ones `play.finished` is true."""


@dataclass(slots=True, eq=False)
class Play:
    """An answer that the engine plays. Times are in seconds on the clock of `time.monotonic`."""

    index: int  # index of the choice in the response
    answer: Answer
    script: Script
    listener: TokenListener
    arrived_s: float
    # scheduled_s, first_s, last_s: when the answer joined the batch, and when its first and its latest tokens were
    # emitted; 0.0 before.
    scheduled_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    sent: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    # drafted, accepted: draft tokens of each step that had any, and those accepted.
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all tokens have been played."""
        return self.sent >= len(self.answer.ids)


def request_metrics(plays: Sequence[Play], num_speculative_tokens: int) -> dict[str, Any] | None:
    """Return the `metrics` of a response; None if it has more than one choice."""
    if len(plays) != 1:
        return None
    play = plays[0]
    decode_s = play.last_s - play.first_s
    total_s = play.last_s - play.arrived_s
    return {
        "time_to_first_token_ms": (play.first_s - play.arrived_s) * 1e3,
        "generation_time_ms": decode_s * 1e3,
        "queue_time_ms": max(0.0, play.scheduled_s - play.arrived_s) * 1e3,
        "mean_itl_ms": decode_s * 1e3 / max(1, play.sent - 1),
        "tokens_per_second": play.sent / total_s if total_s > 0 else 0.0,
        "speculative_decoding": _speculation(play, num_speculative_tokens) if num_speculative_tokens else None,
    }


def _speculation(play: Play, k: int) -> dict[str, Any]:
    steps, accepted, drafted = len(play.drafted), sum(play.accepted), sum(play.drafted)
    histogram = [0] * (k + 1)
    for count in play.accepted:
        histogram[min(count, k)] += 1
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": k,
        "per_step_accepted": play.accepted,
        "per_step_drafted": play.drafted,
    }


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a response, summed over its choices."""

    prompt: int
    completion: int
    cached: int
    # Prompt tokens newly added to the prefix cache, in full blocks; None for the APIs that do not report them.
    created_cache: int | None

    @classmethod
    def of(cls, plays: Sequence[Play], *, include_created: bool) -> Usage:
        """Sum the usage of a response; a prompt shared by several choices counts once."""
        prompts = {id(play.answer.prompt_ids): play for play in plays}
        prompt = sum(len(play.answer.prompt_ids) for play in prompts.values())
        cached = sum(play.cached_tokens for play in prompts.values())
        full = sum(len(play.answer.prompt_ids) // BLOCK_TOKENS * BLOCK_TOKENS for play in prompts.values())
        completion = sum(play.sent for play in plays)
        return cls(prompt, completion, cached, max(0, full - cached) if include_created else None)

    def body(self) -> dict[str, Any]:
        """Return the `usage` of a complete answer."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached,
                "created_cache_tokens": self.created_cache,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }

    def chunk(self) -> dict[str, Any]:
        """Return the `usage` of a stream's last chunk, without null fields."""
        details = {"cached_tokens": self.cached}
        if self.created_cache is not None:
            details["created_cache_tokens"] = self.created_cache
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": details,
        }
