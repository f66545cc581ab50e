"""Parameters of one simulated engine: limits, memory and step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from backends.calibration.calibration import Calibration, Drafting, StepTime
from backends.draft_schedule import draft_schedule
from backends.drafter_limit import Beyond, DrafterLimit, beyond_of
from backends.drafting.script import BLOCK_TOKENS
from backends.speculation import MODELLESS, Method

_WHOLE = frozenset({Method.DSPARK, Method.DFLASH, Method.DRAFT_MODEL})
"""Methods that draft all k tokens in vLLM 0.32, whatever the schedule says."""

PROFILE_CONTEXT: Final = 8192
PROFILE_CONTEXT_KEY: Final = "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
"""Tokens of context with which adaptive verification profiles its steps, and the variable that overrides them."""

ASYNCHRONOUS = _WHOLE | {Method.BASELINE, Method.EAGLE, Method.EAGLE3, Method.MTP}
"""Methods with which vLLM 0.32 schedules a step while the previous one runs, by default.

A request that arrives during a step then waits for that step and the next one.
"""


@dataclass(frozen=True, slots=True)
class EngineParameters:
    """Settings of an engine.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> calibration = load_calibration("llama-3.1-8b-h100")
    >>> parameters = EngineParameters.of(calibration, Method.NGRAM, {"num_speculative_tokens": 5})
    >>> parameters.k
    5
    """

    # step, drafting: time of a step; see `StepTime` and `Drafting`.
    step: StepTime
    drafting: Drafting
    k: int = 0  # maximum tokens drafted per step; 0 for a baseline
    # `k_by_batch[b]` is the k for a batch of b requests; the last entry holds for larger ones. Empty: always `k`.
    k_by_batch: tuple[int, ...] = ()
    # Least passes of the drafter in a step, even if the schedule drafts fewer tokens: a head runs once even for none,
    # to fill its cache, and a drafter that ignores the schedule runs for all k.
    least_passes: int = 0
    # max_num_seqs, max_num_batched_tokens, max_model_len: vLLM's limits of the same names.
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    kv_blocks: int = 16_384  # blocks of 16 tokens in the KV cache
    prefix_caching: bool = True  # whether requests share the blocks of common prefixes
    # Whether a step verifies only draft tokens worth their time, as with vLLM's `enable_adaptive_verification`.
    adaptive: bool = False
    profile_context: int = PROFILE_CONTEXT
    drafter_limit: DrafterLimit | None = None  # the longest context that the drafter serves; None if unknown
    # Whether the engine admits a request only if all its known tokens fit into the KV cache: vLLM's
    # `scheduler_reserve_full_isl`.
    reserves_sequence: bool = False
    asynchronous: bool = False  # whether a step is scheduled while the previous one runs: vLLM's `async_scheduling`
    outside_s: float = 0.0  # see `Calibration.outside_s`

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.kv_blocks) < 1 or self.k < 0:
            raise ValueError("the limits of an engine must be positive")

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        method: Method,
        speculative_config: Mapping[str, Any] | None = None,
        *,
        max_model_len: int | None = None,
        kv_blocks: int | None = None,
        drafter_limit: DrafterLimit | None = None,
        profile_context: int | None = None,
    ) -> EngineParameters:
        """Return the parameters of a method from a calibration, with any overrides."""
        config = speculative_config or {}
        adaptive = bool(config.get("enable_adaptive_verification"))
        if adaptive and method in MODELLESS:
            raise ValueError(f"enable_adaptive_verification needs a method with a draft model, not {method!s}")
        drafts = draft_schedule(method, config)
        drafting = calibration.method(method).drafting
        if config.get("parallel_drafting"):
            drafting = drafting.model_copy(update={"parallel": True})
        limits = calibration.scheduler
        return cls(
            step=calibration.step,
            drafting=drafting,
            k=drafts.k,
            k_by_batch=drafts.by_batch,
            least_passes=drafts.k if method in _WHOLE else int(method not in MODELLESS),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=max_model_len or limits.max_model_len,
            kv_blocks=kv_blocks or max(1, calibration.kv_tokens(method) // BLOCK_TOKENS),
            profile_context=profile_context or PROFILE_CONTEXT,
            adaptive=adaptive,
            drafter_limit=drafter_limit or _limit(calibration, method, config),
            reserves_sequence=True,
            outside_s=calibration.outside_s,
            asynchronous=method in ASYNCHRONOUS
            and limits.asynchronous
            and not config.get("disable_padded_drafter_batch"),
        )

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a request's prompt and answer may have together."""
        limit = self.drafter_limit
        return (
            min(self.max_model_len, limit.tokens - self.k)
            if limit and limit.beyond is Beyond.CRASH
            else self.max_model_len
        )


def _limit(calibration: Calibration, method: Method, config: Mapping[str, Any]) -> DrafterLimit | None:
    """Return the limit that the speculative config sets, else that of the calibration's head."""
    tokens = config.get("max_model_len")
    return DrafterLimit(tokens, beyond_of(method)) if tokens else calibration.method(method).drafter_limit
