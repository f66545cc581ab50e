"""What n-gram and suffix lookups would have given on a finished text: it tells, whichever backend wrote it.

Only methods that draft from the text itself can be known so. EAGLE, MTP and draft models must be tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from backends.drafting.ngram import lookup_bounds, ngram_replay
from backends.drafting.suffix import SuffixCache
from backends.speculation import Method
from policies.learned.models.prior import known_k

SHADOWED = frozenset({Method.NGRAM, Method.SUFFIX})
"""The methods of which a text tells."""


class ShadowSettings(BaseModel):
    """How much is replayed, and what that may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample: float = Field(
        default=1.0, ge=0, le=1, description="Share of the finished texts that are replayed; 0: none."
    )
    cpu: float = Field(default=0.02, gt=0, le=1, description="Share of one core that replaying may take.")
    queue: int = Field(default=256, ge=1, description="Texts that may wait; what would be more is left out.")
    queue_mib: float = Field(default=64.0, gt=0, description="MiB of them.")
    max_text_kib: float = Field(
        default=1024.0,
        gt=0,
        description="A longer request, or answer with what frames it (200 bytes a chunk of a stream), is left out.",
    )


@dataclass(frozen=True, slots=True)
class ShadowArm:
    """A way of looking drafts up.

    Parameters
    ----------
    arm
        As `policies.learned.models.acceptance.arm_of` has it.
    config
        The speculative config of a backend of that arm.
    """

    arm: str
    method: Method
    k: int
    config: Mapping[str, Any] = field(default_factory=dict)


class ShadowBias:
    """How far replays are from what engines get on the same texts.

    Pieces are not tokens, and vLLM's suffix decoding also drafts from earlier answers, which a replay does not. Where
    the method itself was at work both are known, and their ratio is that of the others.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def compare(self, arm: str, told: float, replayed: float) -> None:
        """Note the tokens per step that an engine told of a text, and those of the replay."""
        count, total = self._sums.get(arm, (0.0, 0.0))
        log = max(-1.0, min(1.0, math.log(max(1.0, told) / max(1.0, replayed))))
        self._sums[arm] = _KEEP * count + 1.0, _KEEP * total + log

    def corrected(self, arm: str, replayed: float) -> float:
        """Return the tokens per step that an engine may be expected to get, at least 1."""
        count, total = self._sums.get(arm, (0.0, 0.0))
        return max(1.0, replayed * math.exp(total / (count + _AS_IF_NONE)))


def shadow_arms(backends: Iterable[tuple[Method, int, Mapping[str, Any]]]) -> list[ShadowArm]:
    """Return the arms of a pool that a text tells of; where several backends share one, the first's config stands.

    Parameters
    ----------
    backends
        Method, drafted tokens (0 where not said) and speculative config of each.
    """
    arms: dict[str, ShadowArm] = {}
    for method, k, config in backends:
        if method in SHADOWED:
            drafted = known_k(method, k)
            arm = f"{method.value}:{drafted}"
            arms.setdefault(arm, ShadowArm(arm, method, drafted, config))
    return list(arms.values())


def replayed(prompt: Sequence[int], output: Sequence[int], arms: Iterable[ShadowArm]) -> dict[str, float]:
    """Return the tokens per step that each arm would have given, the step of the prefill among them.

    Suffix decoding is replayed without the cache that vLLM keeps of earlier answers.

    Parameters
    ----------
    prompt, output
        Token ids, or other numbers that are equal where tokens are; at least one each.
    """
    found = {}
    for arm in arms:
        if arm.method is Method.NGRAM:
            emitted, _ = ngram_replay(prompt, output, arm.k, *lookup_bounds(arm.config))
        else:
            settings = {**arm.config, "num_speculative_tokens": arm.k, "suffix_decoding_max_cached_requests": 0}
            emitted, _ = SuffixCache.of(settings).replay(prompt, output)
        found[arm.arm] = len(output) / steps_of(emitted)
    return found


def steps_of(emitted: npt.NDArray[np.int32]) -> int:
    """Return how many steps an answer takes, see `backends.drafting.script.Script.emitted`."""
    by_position: list[int] = emitted.tolist()
    at = steps = 0
    while at < len(by_position):
        at += by_position[at]
        steps += 1
    return steps


_KEEP = 0.995
"""Per text: about the last two hundred count."""
_AS_IF_NONE = 10.0
"""Texts without a difference that a ratio begins with."""
