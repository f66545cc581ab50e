"""GPU memory of a replica: weights and KV cache of target and draft, and whether they fit.

Weights in GiB are parameters * bytes / 2^30; the KV cache of a token in KiB is
layers * 2 * kv_heads * head_dim * bytes / 1024. Both are summed over target and draft, as in "Speculative Decoding:
Performance or Illusion?", arXiv 2601.11580.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.memory.catalogue import Gpu, Shape

GIB = 2**30
KIB_PER_GIB = 2**20

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter or a KV entry; for int4 without the scales and the unquantized layers."""

UTILIZATION = 0.9
"""vLLM's `--gpu-memory-utilization` of the calibrations; the default of vLLM 0.32 is 0.92."""

RESERVED_GIB = 3.0
"""GiB of activations and CUDA graphs on each GPU: our estimate, also used by the calibrations."""

MAX_DRAFT_SHARE = 0.15
"""Largest share of the memory for a draft's weights, from a configuration and decision guide of July 2026."""

_BLOCK_TOKENS = 16  # vLLM's default block size


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a replica over all its GPUs.

    Examples
    --------
    >>> footprint = Footprint(target_gib=15.0, target_kv_kib=128.0, draft_gib=0.5, draft_kv_kib=4.0)
    >>> footprint.weights_gib, footprint.kv_kib_per_token
    (15.5, 132.0)
    """

    # target_gib, draft_gib: weights of target and draft; 0 without a draft.
    target_gib: float
    # target_kv_kib, draft_kv_kib: KV cache of one token.
    target_kv_kib: float
    draft_gib: float = 0.0
    draft_kv_kib: float = 0.0
    # target_kv_heads, draft_kv_heads: KV heads; with more GPUs than heads, the KV cache is replicated.
    target_kv_heads: int = 8
    draft_kv_heads: int = 8

    @property
    def weights_gib(self) -> float:
        """Weights of target and draft."""
        return self.target_gib + self.draft_gib

    @property
    def kv_kib_per_token(self) -> float:
        """KV cache of one token in target and draft."""
        return self.target_kv_kib + self.draft_kv_kib


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of one replica.

    Examples
    --------
    >>> from backends.memory.catalogue import gpu
    >>> machine = Machine(gpu("h100"), tensor_parallel=4)
    >>> machine.title, round(machine.usable_gib, 1)
    ('4x H100 80GB HBM3', 68.7)
    """

    gpu: Gpu
    tensor_parallel: int = 1  # number of GPUs over which target and draft are split
    utilization: float = UTILIZATION  # share of a GPU's memory that vLLM may use
    reserved_gib: float = RESERVED_GIB  # GiB of each GPU for activations and CUDA graphs

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError("a replica needs at least one GPU")
        if not 0 < self.utilization <= 1 or self.reserved_gib < 0:
            raise ValueError("utilization must be above 0 and at most 1, and reserved_gib not negative")

    @property
    def title(self) -> str:
        """Number and name of the GPUs, such as `4x H100 80GB HBM3`."""
        return f"{self.tensor_parallel}x {self.gpu.title}"

    @property
    def usable_gib(self) -> float:
        """GiB of each GPU for weights and KV cache."""
        return self.gpu.memory_gib * self.utilization - self.reserved_gib


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a replica fits on a machine."""

    fits: bool  # whether it fits and its draft is not too large
    reason: str  # why it fits or not, in words
    kv_gib: float  # GiB for the KV cache over all GPUs; negative if the weights do not fit
    tokens: int  # tokens that the KV cache holds, in whole blocks; 0 if the weights do not fit
    draft_share: float  # the draft's weights as a share of the memory of the GPUs
    tokens_lost: float  # share of the tokens, 0 to 1, that the draft costs through its weights and its own KV cache


def footprint(
    target: Shape, draft: Shape | None = None, *, dtype: str = "bf16", draft_dtype: str = "", kv_dtype: str = "bf16"
) -> Footprint:
    """Return the memory of a replica.

    Examples
    --------
    >>> from backends.memory.catalogue import target
    >>> memory = footprint(target("llama-3.1-8b"))
    >>> round(memory.weights_gib, 2), memory.kv_kib_per_token
    (14.96, 128.0)
    """
    draft_bytes = _bytes(draft_dtype or dtype)
    kv_bytes = _bytes(kv_dtype)
    return Footprint(
        target_gib=weights_gib(target, _bytes(dtype)),
        target_kv_kib=kv_kib_per_token(target, kv_bytes),
        draft_gib=weights_gib(draft, draft_bytes) if draft else 0.0,
        draft_kv_kib=kv_kib_per_token(draft, kv_bytes) if draft else 0.0,
        target_kv_heads=max(1, target.kv_heads),
        draft_kv_heads=max(1, draft.kv_heads) if draft else 1,
    )


def weights_gib(shape: Shape, bytes_per_parameter: float = 2.0) -> float:
    """Return the size of a model's weights in GiB."""
    return shape.parameters * bytes_per_parameter / GIB


def kv_kib_per_token(shape: Shape, bytes_per_entry: float = 2.0) -> float:
    """Return the size of a model's KV cache per token in KiB; 0 for heads without attention."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * bytes_per_entry / 1024


def kv_room(memory: Footprint, machine: Machine) -> tuple[float, int]:
    """Return the GiB for the KV cache over all GPUs, and the tokens that it holds."""
    parallel = machine.tensor_parallel
    room_gib = machine.usable_gib - memory.weights_gib / parallel
    kib = memory.target_kv_kib / min(parallel, memory.target_kv_heads)
    kib += memory.draft_kv_kib / min(parallel, memory.draft_kv_heads)
    blocks = int(max(0.0, room_gib) * KIB_PER_GIB / kib) // _BLOCK_TOKENS
    return room_gib * parallel, blocks * _BLOCK_TOKENS


def fit(
    memory: Footprint, machine: Machine, *, max_model_len: int = 1, max_draft_share: float = MAX_DRAFT_SHARE
) -> Fit:
    """Return whether a replica's weights and a request of the longest context fit, with a draft of acceptable size.

    Examples
    --------
    >>> from backends.memory.catalogue import gpu, target
    >>> fit(footprint(target("llama-3-70b")), Machine(gpu("h100"))).reason
    '131.42 GiB of weights do not fit on 1x H100 80GB HBM3: 62.7 GiB short; 2 of them would be enough'
    """
    room_gib, tokens = kv_room(memory, machine)
    target_alone = Footprint(memory.target_gib, memory.target_kv_kib, target_kv_heads=memory.target_kv_heads)
    target_room_gib, target_tokens = kv_room(target_alone, machine)
    share = memory.draft_gib / (machine.gpu.memory_gib * machine.tensor_parallel)
    lost = 1 - tokens / target_tokens if target_tokens else 0.0
    fits, reason = False, ""
    if room_gib <= 0:
        reason = f"{_weights(memory)} do not fit on {machine.title}: {-room_gib:.1f} GiB short"
        if target_room_gib > 0:
            reason += "; the target alone would fit"
        elif needed := _gpus_needed(memory, machine):
            reason += f"; {needed} of them would be enough"
    elif tokens < max_model_len:
        reason = (
            f"{_weights(memory)} leave {room_gib:.1f} GiB on {machine.title}; that holds {tokens:,} tokens, less than "
            f"one request of {max_model_len:,}; it would start with --max-model-len {tokens}"
        )
    elif share > max_draft_share:
        reason = (
            f"the draft's {memory.draft_gib:.2f} GiB are {share:.0%} of {machine.title}; above {max_draft_share:.0%} a "
            "draft costs more context than it gains"
        )
    else:
        fits = True
        reason = f"{_weights(memory)}; {room_gib:.1f} GiB for {tokens:,} tokens of context on {machine.title}"
        if memory.draft_gib or memory.draft_kv_kib:
            reason += f", {lost:.0%} fewer than without the draft"
    return Fit(fits, reason, room_gib, tokens, share, lost)


def _weights(memory: Footprint) -> str:
    text = f"{memory.weights_gib:.2f} GiB of weights"
    return text + (f" ({memory.draft_gib:.2f} of the draft)" if memory.draft_gib else "")


def _gpus_needed(memory: Footprint, machine: Machine) -> int:
    """Return the number of GPUs, a power of two, that hold the weights; 0 if more than 64 are needed."""
    if machine.usable_gib <= 0:
        return 0
    needed = 2 ** math.ceil(math.log2(memory.weights_gib / machine.usable_gib + 1e-9))
    return needed if needed <= 64 else 0


def _bytes(dtype: str) -> float:
    if dtype not in BYTES:
        raise ValueError(f"no such dtype: {dtype!r}; known: {', '.join(BYTES)}")
    return BYTES[dtype]
