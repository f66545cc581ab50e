"""GPU memory of a replica: whether weights and KV cache of target and draft fit, by a calibration's figures."""

from __future__ import annotations

from dataclasses import dataclass

from backends.calibration.calibration import Calibration
from backends.drafting.script import BLOCK_TOKENS
from backends.speculation import Method

MAX_DRAFT_SHARE = 0.15
"""Largest share of the memory for a draft's weights, from a configuration and decision guide of July 2026."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a replica fits into the memory of its GPUs."""

    fits: bool  # whether it fits and its draft is not too large
    reason: str  # why it fits or not, in words
    kv_gib: float  # of the KV cache over all GPUs; negative if the weights do not fit
    tokens: int  # in whole blocks of the KV cache; 0 if the weights do not fit


def fit(calibration: Calibration, method: Method, max_model_len: int = 1) -> Fit:
    """Return whether a replica's weights and its longest context fit, with a draft of acceptable size.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> fit(load_calibration("llama-3.1-8b-h100"), Method.EAGLE3).reason
    '15.75 GiB of weights (0.79 of the draft); 52.9 GiB for 420,144 tokens of context on 1x H100 80GB'
    """
    memory, draft, machine = calibration.memory, calibration.method(method), machine_of(calibration)
    room_gib, held = calibration.kv_room(method)
    tokens = max(0, held) // BLOCK_TOKENS * BLOCK_TOKENS
    weights = f"{memory.weights_gib + draft.weights_gib:.2f} GiB of weights"
    weights += f" ({draft.weights_gib:.2f} of the draft)" if draft.weights_gib else ""
    share, fits = draft.weights_gib / memory.gpu_gib, False
    if room_gib <= 0:
        reason = f"{weights} do not fit on {machine}: {-room_gib:.1f} GiB short"
    elif tokens < max_model_len:
        reason = (
            f"{weights} leave {room_gib:.1f} GiB on {machine}; that holds {tokens:,} tokens, less than "
            f"one request of {max_model_len:,}; it would start with --max-model-len {tokens}"
        )
    elif share > MAX_DRAFT_SHARE:
        reason = (
            f"the draft's {draft.weights_gib:.2f} GiB are {share:.0%} of {machine}; above {MAX_DRAFT_SHARE:.0%} a "
            "draft costs more context than it gains"
        )
    else:
        fits = True
        reason = f"{weights}; {room_gib:.1f} GiB for {tokens:,} tokens of context on {machine}"
    return Fit(fits, reason, room_gib, tokens)


def machine_of(calibration: Calibration) -> str:
    """Return the GPUs of one replica, such as `4x H100 80GB`."""
    return calibration.hardware.partition(",")[0]
