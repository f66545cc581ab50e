"""What the chunks of a replica's streams stand for: tokens, and engine steps."""

from __future__ import annotations

import math
from typing import Final

from backends.engine_metrics import EngineMetrics

_HORIZON_TOKENS: Final = 50_000.0
"""Tokens of the engine after which what was counted before weighs 1/e."""

_ENOUGH_TOKENS: Final = 2_000.0
_NOISE: Final = 1.05


class ChunkCounts:
    """The tokens and chunks of a replica's streams, beside the tokens and steps that its engine has counted.

    One chunk is one step only while vLLM's API server keeps up with its engine: else it joins the outputs that wait, as
    it does on purpose with `--stream-interval`. Then chunks say more tokens a step than there were.

    Examples
    --------
    >>> counts = ChunkCounts()
    >>> counts.add(tokens=3000, chunks=1000)
    >>> counts.read(EngineMetrics(later_steps=0))
    >>> counts.read(EngineMetrics(generation_tokens=3000, first_steps=20, later_steps=1980))
    >>> round(counts.tokens_per_chunk, 3), counts.steps_per_chunk
    (3.0, 2.0)
    """

    __slots__ = ("_before", "_chunks", "_engine_steps", "_engine_tokens", "_tokens", "steps_per_chunk")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._chunks = 0.0
        self._engine_tokens = 0.0
        self._engine_steps = 0.0
        self._before: EngineMetrics | None = None
        self.steps_per_chunk = 1.0

    def add(self, tokens: int, chunks: int) -> None:
        """Add an answer whose tokens are known."""
        self._tokens += tokens
        self._chunks += chunks

    @property
    def tokens_per_chunk(self) -> float:
        """Mean tokens of a chunk, as far as is known."""
        if self._chunks:
            return max(1.0, self._tokens / self._chunks)
        return max(1.0, self._engine_tokens / self._engine_steps) if self._engine_steps else 1.0

    def read(self, engine: EngineMetrics) -> None:
        """Add what an engine has done since its metrics were last read, and compare."""
        before, self._before = self._before, engine
        if before is None or before is engine:
            return
        if engine.steps is None or before.steps is None:
            return
        tokens, steps = engine.generation_tokens - before.generation_tokens, engine.steps - before.steps
        if tokens <= 0 or steps <= 0:  # none, or another engine
            return
        self._engine_tokens += tokens
        self._engine_steps += steps
        self.steps_per_chunk = self._compare()
        kept = math.exp(-tokens / _HORIZON_TOKENS)
        self._engine_tokens *= kept
        self._engine_steps *= kept
        self._tokens *= kept
        self._chunks *= kept

    def _compare(self) -> float:
        """Return how many steps a chunk stands for.

        The engine also serves others, and answers in one piece: its steps over our chunks are a bound. Our tokens per
        chunk over its tokens per step are an estimate, as good as our streams are like all that it serves.
        """
        if not self._chunks or min(self._tokens, self._engine_tokens) < _ENOUGH_TOKENS:
            return self.steps_per_chunk
        bound = self._engine_steps / self._chunks
        estimate = self._tokens / self._chunks * self._engine_steps / self._engine_tokens
        ratio = min(bound, estimate)
        return ratio if ratio > _NOISE else 1.0
