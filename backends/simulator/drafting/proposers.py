"""A replica's proposer: turns a request's text into the script that the engine plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backends.calibration.calibration import Calibration
from backends.draft_schedule import draft_tokens
from backends.drafting.ngram import UNLIMITED, lookup_bounds, ngram_replay
from backends.drafting.script import Script, Steps, block_hashes, plain_steps
from backends.drafting.suffix import SuffixCache
from backends.simulator.drafting.acceptance import model_based_replay
from backends.speculation import Method


class Proposer:
    """One replica's proposer; with suffix decoding it remembers the replica's earlier answers.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> config = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    >>> proposer = Proposer(Method.NGRAM, config, load_calibration("llama-3.1-8b-h100"))
    >>> proposer.script([1, 2, 3, 4, 5], [2, 3, 4, 5], temperature=0.0, kind="chat").emitted
    array([1, 3, 2, 1], dtype=int32)
    """

    def __init__(
        self,
        method: Method,
        speculative_config: Mapping[str, Any] | None,
        calibration: Calibration,
        seed: int = 0,
        max_model_len: int = UNLIMITED,
    ) -> None:
        config = speculative_config or {}
        calibration.method(method)
        self.method = method  # as passed to vLLM, with vLLM's defaults
        self.k = draft_tokens(method, config)
        self._calibration = calibration  # source of the acceptance of methods with a draft model
        self._rng = np.random.default_rng(seed)
        self._max_model_len = max_model_len  # position beyond which nothing is drafted
        self._lookup = lookup_bounds(config)
        self._suffix = SuffixCache(config, max_model_len) if method is Method.SUFFIX else None

    def script(self, prompt_ids: Sequence[int], output_ids: Sequence[int], temperature: float, kind: str) -> Script:
        """Return the script of a request whose answer is `output_ids`."""
        emitted, drafted = self._steps(prompt_ids, output_ids, temperature, kind)
        blocks = block_hashes([*prompt_ids, *output_ids])
        return Script(len(prompt_ids), len(output_ids), emitted, drafted, blocks)

    def _steps(self, prompt_ids: Sequence[int], output_ids: Sequence[int], temperature: float, kind: str) -> Steps:
        if self.method is Method.BASELINE:
            return plain_steps(len(output_ids))
        if self.method is Method.NGRAM:
            return ngram_replay(prompt_ids, output_ids, self.k, *self._lookup, self._max_model_len)
        if self._suffix is not None:
            return self._suffix.replay(prompt_ids, output_ids)
        return model_based_replay(
            self._rng, self._calibration, self.method, self.k, temperature, kind, len(prompt_ids), len(output_ids)
        )
