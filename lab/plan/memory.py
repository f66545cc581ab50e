"""GPU memory of a replica: weights and KV cache of target and draft, and whether they fit.

Weights in GiB are parameters * 2 bytes / 2^30; the KV cache of a token in KiB is layers * 2 * kv_heads * head_dim *
2 bytes / 1024. Both are summed over target and draft, as in "Speculative Decoding: Performance or Illusion?",
arXiv 2601.11580.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.plan.catalogue import Gpu, Shape

UTILIZATION = 0.9
"""vLLM's `--gpu-memory-utilization` of the calibrations; the default of vLLM 0.32 is 0.92."""

RESERVED_GIB = 3.0
"""GiB of activations and CUDA graphs on each GPU: our estimate, also used by the calibrations."""

MAX_DRAFT_SHARE = 0.15
"""Largest share of the memory for a draft's weights, from a configuration and decision guide of July 2026."""

_BYTES = 2  # of a parameter and of a KV entry, in bf16 and fp16
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

    target_gib: float
    target_kv_kib: float  # of one token
    draft_gib: float = 0.0
    draft_kv_kib: float = 0.0
    # With more GPUs than heads, the KV cache is replicated.
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
    """The GPUs of one replica."""

    gpu: Gpu
    tensor_parallel: int = 1  # number of GPUs over which target and draft are split
    utilization: float = UTILIZATION  # share of a GPU's memory that vLLM may use
    reserved_gib: float = RESERVED_GIB  # of each GPU, for activations and CUDA graphs

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
    kv_gib: float  # for the KV cache over all GPUs; negative if the weights do not fit
    tokens: int  # that the KV cache holds, in whole blocks; 0 if the weights do not fit


def footprint(target: Shape, draft: Shape | None = None) -> Footprint:
    """Return the memory of a replica.

    Examples
    --------
    >>> from lab.plan.catalogue import target
    >>> memory = footprint(target("llama-3.1-8b"))
    >>> round(memory.weights_gib, 2), memory.kv_kib_per_token
    (14.96, 128.0)
    """
    own = Footprint(_weights_gib(target), _kv_kib_per_token(target), target_kv_heads=target.kv_heads)
    if draft is None:
        return own
    return Footprint(
        own.target_gib,
        own.target_kv_kib,
        _weights_gib(draft),
        _kv_kib_per_token(draft),
        target.kv_heads,
        draft.kv_heads,
    )


def _weights_gib(shape: Shape) -> float:
    return shape.parameters * _BYTES / 2**30


def _kv_kib_per_token(shape: Shape) -> float:
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * _BYTES / 1024


def kv_room(memory: Footprint, machine: Machine) -> tuple[float, int]:
    """Return the GiB for the KV cache over all GPUs, and the tokens that it holds."""
    parallel = machine.tensor_parallel
    room_gib = machine.usable_gib - memory.weights_gib / parallel
    kib = memory.target_kv_kib / min(parallel, memory.target_kv_heads)
    kib += memory.draft_kv_kib / min(parallel, memory.draft_kv_heads)
    blocks = int(max(0.0, room_gib) * 2**20 / kib) // _BLOCK_TOKENS
    return room_gib * parallel, blocks * _BLOCK_TOKENS


def fit(memory: Footprint, machine: Machine, *, max_model_len: int = 1) -> Fit:
    """Return whether a replica's weights and a request of the longest context fit, with a draft of acceptable size.

    Examples
    --------
    >>> from lab.plan.catalogue import gpu, target
    >>> fit(footprint(target("llama-3-70b")), Machine(gpu("h100"))).reason
    '131.42 GiB of weights do not fit on 1x H100 80GB HBM3: 62.7 GiB short'
    """
    room_gib, tokens = kv_room(memory, machine)
    share = memory.draft_gib / (machine.gpu.memory_gib * machine.tensor_parallel)
    weights = f"{memory.weights_gib:.2f} GiB of weights"
    weights += f" ({memory.draft_gib:.2f} of the draft)" if memory.draft_gib else ""
    fits = False
    if room_gib <= 0:
        reason = f"{weights} do not fit on {machine.title}: {-room_gib:.1f} GiB short"
    elif tokens < max_model_len:
        reason = (
            f"{weights} leave {room_gib:.1f} GiB on {machine.title}; that holds {tokens:,} tokens, less than "
            f"one request of {max_model_len:,}; it would start with --max-model-len {tokens}"
        )
    elif share > MAX_DRAFT_SHARE:
        reason = (
            f"the draft's {memory.draft_gib:.2f} GiB are {share:.0%} of {machine.title}; above {MAX_DRAFT_SHARE:.0%} a "
            "draft costs more context than it gains"
        )
    else:
        fits = True
        reason = f"{weights}; {room_gib:.1f} GiB for {tokens:,} tokens of context on {machine.title}"
    return Fit(fits, reason, room_gib, tokens)
