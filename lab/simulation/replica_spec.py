"""A simulated replica, as a pool file or a plan describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.drafter_limit import DrafterLimit
from backends.speculation import Method


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One simulated replica of the pool.

    Examples
    --------
    >>> ReplicaSpec("head", Method.EAGLE3, {"num_speculative_tokens": 3}, "llama-3.1-8b-h100").weight
    1.0
    """

    name: str
    method: Method
    config: Mapping[str, Any]  # speculative config without the method
    calibration: str  # its name
    weight: float = 1.0
    max_model_len: int | None = None  # None: the calibration's
    kv_blocks: int | None = None  # likewise
    drafter_limit: DrafterLimit | None = None  # likewise
    profile_context: int | None = None  # tokens with which adaptive verification profiles; None: vLLM's default
