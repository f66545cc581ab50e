"""Shadow drafting: n-gram and suffix drafting replayed on finished texts, whichever backend generated them.

This works only for methods that draft from the text itself. The acceptance of EAGLE, MTP and draft models can only be
observed on a backend that runs them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from backends.draft_schedule import effective_k
from backends.drafting.ngram import lookup_bounds, ngram_replay
from backends.drafting.suffix import SuffixCache
from backends.speculation import Method
from backends.validation import CheckedModel

# Words with the preceding blank, in parts of up to eight letters; numbers of up to three digits; up to four punctuation
# marks; single characters in scripts without blanks.
_PIECE = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]"
    r"| ?[^\W\d\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]{1,8}"
    r"| ?\d{1,3}| ?[^\w\s]{1,4}|\s+"
)


def piece_ids(prompt: str, output: str) -> tuple[list[int], list[int]]:
    """Return an id for each piece of a prompt and of its answer; equal pieces have equal ids, counted from 1.

    Examples
    --------
    >>> piece_ids("to be or not", " to be")
    ([1, 2, 3, 4], [5, 2])
    """
    known: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [known.setdefault(piece, len(known) + 1) for piece in _PIECE.findall(text)]

    return ids(prompt), ids(output)


SHADOWED = frozenset({Method.NGRAM, Method.SUFFIX})
"""The methods that can be replayed."""


class ShadowSettings(CheckedModel):
    """Replay of n-gram and suffix drafting on finished texts, which measures their acceptance on texts of others."""

    sample: float = Field(default=1.0, ge=0, le=1, description="Share of finished texts to replay; 0: none.")
    cpu: float = Field(default=0.02, gt=0, le=1, description="Maximum share of one core.")


@dataclass(frozen=True, slots=True)
class ShadowArm:
    """An arm that can be replayed."""

    arm: str  # name of the arm, see `policies.arm.arm_of`
    method: Method
    k: int  # maximum tokens drafted per step
    config: Mapping[str, Any] = field(default_factory=dict)  # speculative config of a backend of that arm


class ShadowBias:
    """The ratio between the tokens per step of engines and of replays on the same texts, by arm.

    The two differ because pieces are not tokens, and because vLLM's suffix decoding also drafts from earlier answers.
    The ratio is measured on texts that a backend of the arm generated, and applied to the others.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def compare(self, arm: str, measured: float, replayed: float) -> None:
        """Add the tokens per step that an engine and a replay had on the same text."""
        count, total = self._sums.get(arm, (0.0, 0.0))
        log = max(-1.0, min(1.0, math.log(max(1.0, measured) / max(1.0, replayed))))
        self._sums[arm] = _KEEP * count + 1.0, _KEEP * total + log

    def knows(self, arm: str) -> bool:
        """Return whether answers of an arm's engines are compared with replays of their texts."""
        return arm in self._sums

    def corrected(self, arm: str, replayed: float) -> float:
        """Return the expected tokens per step of an engine, given those of a replay; at least 1."""
        count, total = self._sums.get(arm, (0.0, 0.0))
        return max(1.0, replayed * math.exp(total / (count + _PRIOR_COUNT)))


def shadow_arms(backends: Iterable[tuple[Method, int, Mapping[str, Any]]]) -> list[ShadowArm]:
    """Return the arms of a pool that can be replayed, each with the config of its first backend.

    Examples
    --------
    >>> [shadow.arm for shadow in shadow_arms([(Method.NGRAM, 5, {}), (Method.EAGLE3, 3, {}), (Method.SUFFIX, 0, {})])]
    ['ngram:5', 'suffix:24']
    """
    arms: dict[str, ShadowArm] = {}
    for method, k, config in backends:
        if method in SHADOWED:
            depth = effective_k(method, k)
            arm = f"{method.value}:{depth}"
            arms.setdefault(arm, ShadowArm(arm, method, depth, config))
    return list(arms.values())


def replayed(prompt: Sequence[int], output: Sequence[int], arms: Iterable[ShadowArm]) -> dict[str, float]:
    """Return the tokens per step that each arm reaches on a text, counting the prefill step.

    Suffix decoding is replayed without vLLM's cache of earlier answers.

    Examples
    --------
    >>> replayed([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [6, 7, 8, 9], [ShadowArm("ngram:5", Method.NGRAM, 5)])
    {'ngram:5': 2.0}
    """
    per_step = {}
    for arm in arms:
        if arm.method is Method.NGRAM:
            emitted, _ = ngram_replay(prompt, output, arm.k, *lookup_bounds(arm.config))
        else:
            settings = {**arm.config, "num_speculative_tokens": arm.k, "suffix_decoding_max_cached_requests": 0}
            emitted, _ = SuffixCache(settings).replay(prompt, output)
        per_step[arm.arm] = len(output) / steps_of(emitted)
    return per_step


def steps_of(emitted: npt.NDArray[np.int32]) -> int:
    """Return the number of steps of an answer.

    Examples
    --------
    >>> steps_of(np.array([1, 3, 1, 1, 1], np.int32))
    3
    """
    by_position: list[int] = emitted.tolist()
    position = steps = 0
    while position < len(by_position):
        position += by_position[position]
        steps += 1
    return steps


_KEEP = 0.995
"""Decay per text; about the last two hundred count."""
_PRIOR_COUNT = 10.0
"""Number of imaginary texts without bias at the start."""
