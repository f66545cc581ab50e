"""Weights and KV cache of a replica that speculates: what they take, what they leave, and whether that is enough.

Weights in GiB are parameters * bytes / 2^30, a token's KV in KiB is layers * 2 * kv_heads * head_dim * bytes / 1024, of
target and draft together: the arithmetic of "Speculative Decoding: Performance or Illusion?", arXiv 2601.11580.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.memory.catalogue import Gpu, Shape

GIB = 2**30
KIB_PER_GIB = 2**20

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter or a KV entry. The scales of int4, and layers it leaves alone, come on top."""

UTILIZATION = 0.9
"""vLLM's `--gpu-memory-utilization`: what the calibrations were measured with; the default of vLLM 0.32 is 0.92."""

RESERVED_GIB = 3.0
"""Activations and CUDA graphs on each GPU: our estimate, as in the calibrations of the simulator."""

MOST_DRAFT_SHARE = 0.15
"""Share of the memory under which a draft's weights should stay: a configuration and decision guide of July 2026."""

_BLOCK_TOKENS = 16  # vLLM's


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a replica keeps in memory, over all its GPUs together.

    Parameters
    ----------
    target_gib, draft_gib
        Weights; a replica without a draft has 0 of it.
    target_kv_kib, draft_kv_kib
        KV cache of one token.
    target_kv_heads, draft_kv_heads
        Over more GPUs than it has KV heads, a model's KV cache is kept more than once.
    """

    target_gib: float
    target_kv_kib: float
    draft_gib: float = 0.0
    draft_kv_kib: float = 0.0
    target_kv_heads: int = 8
    draft_kv_heads: int = 8

    @property
    def weights_gib(self) -> float:
        """Weights of target and draft."""
        return self.target_gib + self.draft_gib

    @property
    def kv_kib_per_token(self) -> float:
        """KV cache of one token, of target and draft."""
        return self.target_kv_kib + self.draft_kv_kib


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of one replica.

    Parameters
    ----------
    tensor_parallel
        How many there are; target and draft are split over them.
    utilization
        Share of each that vLLM may use.
    reserved_gib
        Of each, for what is neither weights nor KV cache.
    """

    gpu: Gpu
    tensor_parallel: int = 1
    utilization: float = UTILIZATION
    reserved_gib: float = RESERVED_GIB

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError("a replica has at least one GPU")
        if not 0 < self.utilization <= 1 or self.reserved_gib < 0:
            raise ValueError("the utilization is above 0 and at most 1, and what is reserved is not negative")

    @property
    def title(self) -> str:
        """The GPUs in words, as `4x H100 80GB HBM3`."""
        return f"{self.tensor_parallel}x {self.gpu.title}"

    @property
    def usable_gib(self) -> float:
        """GiB of each GPU for weights and KV cache."""
        return self.gpu.memory_gib * self.utilization - self.reserved_gib


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a replica fits.

    Parameters
    ----------
    fits
        Whether it should be run so.
    reason
        Why, or why not, in words.
    kv_gib
        Room for the KV cache over all GPUs; negative by what is missing.
    tokens
        Tokens of context that may be under way at once, in whole blocks; 0 where the weights do not fit.
    draft_share
        The draft's weights over the memory of the GPUs.
    tokens_lost
        Share of those tokens that the draft costs, 0 to 1: its weights, and its own KV cache beside the target's.
    """

    fits: bool
    reason: str
    kv_gib: float
    tokens: int
    draft_share: float
    tokens_lost: float


def footprint(
    target: Shape, draft: Shape | None = None, *, dtype: str = "bf16", draft_dtype: str = "", kv_dtype: str = "bf16"
) -> Footprint:
    """Work out what a replica keeps in memory.

    Parameters
    ----------
    draft
        The draft model or head; None for methods that have none.
    dtype, draft_dtype, kv_dtype
        Keys of `BYTES`; the draft's is the target's where it is empty.

    Raises
    ------
    ValueError
        If a dtype is none of those.
    """
    of_draft = _bytes(draft_dtype or dtype)
    of_kv = _bytes(kv_dtype)
    return Footprint(
        target_gib=weights_gib(target, _bytes(dtype)),
        target_kv_kib=kv_kib_per_token(target, of_kv),
        draft_gib=weights_gib(draft, of_draft) if draft else 0.0,
        draft_kv_kib=kv_kib_per_token(draft, of_kv) if draft else 0.0,
        target_kv_heads=max(1, target.kv_heads),
        draft_kv_heads=max(1, draft.kv_heads) if draft else 1,
    )


def weights_gib(shape: Shape, bytes_per_parameter: float = 2.0) -> float:
    """Return the GiB of a model's weights."""
    return shape.parameters * bytes_per_parameter / GIB


def kv_kib_per_token(shape: Shape, bytes_per_entry: float = 2.0) -> float:
    """Return the KiB that a model's keys and values of one token take; 0 for heads without attention."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim * bytes_per_entry / 1024


def kv_room(held: Footprint, machine: Machine) -> tuple[float, int]:
    """Return the GiB left for the KV cache over all GPUs, and how many tokens it holds."""
    parallel = machine.tensor_parallel
    room_gib = machine.usable_gib - held.weights_gib / parallel
    kib = held.target_kv_kib / min(parallel, held.target_kv_heads)
    kib += held.draft_kv_kib / min(parallel, held.draft_kv_heads)
    blocks = int(max(0.0, room_gib) * KIB_PER_GIB / kib) // _BLOCK_TOKENS
    return room_gib * parallel, blocks * _BLOCK_TOKENS


def fit(
    held: Footprint, machine: Machine, *, max_model_len: int = 1, most_draft_share: float = MOST_DRAFT_SHARE
) -> Fit:
    """Judge whether a replica fits: its weights, one request of the longest context, and its draft within its share.

    Parameters
    ----------
    max_model_len
        Tokens of the longest request; vLLM does not start where the KV cache holds fewer.
    most_draft_share
        Share of the memory that the draft's weights may take.
    """
    room_gib, tokens = kv_room(held, machine)
    without, plain_tokens = kv_room(Footprint(held.target_gib, held.target_kv_kib, 0, 0, held.target_kv_heads), machine)
    share = held.draft_gib / (machine.gpu.memory_gib * machine.tensor_parallel)
    lost = 1 - tokens / plain_tokens if plain_tokens else 0.0
    fits, reason = False, ""
    if room_gib <= 0:
        reason = f"{_weights(held)} do not fit on {machine.title}: {-room_gib:.1f} GiB short"
        if without > 0:
            reason += ", though the target alone would fit"
        elif needed := _gpus_needed(held, machine):
            reason += f"; {needed} of them would do"
    elif tokens < max_model_len:
        reason = (
            f"the {room_gib:.1f} GiB that {_weights(held)} leave on {machine.title} hold {tokens:,} tokens, less than "
            f"one request of {max_model_len:,}; --max-model-len {tokens} would start"
        )
    elif share > most_draft_share:
        reason = (
            f"the draft's {held.draft_gib:.2f} GiB are {share:.0%} of {machine.title}; over {most_draft_share:.0%} a "
            "draft costs more context than it is worth"
        )
    else:
        fits = True
        reason = f"{_weights(held)}; {room_gib:.1f} GiB for {tokens:,} tokens of context on {machine.title}"
        if held.draft_gib or held.draft_kv_kib:
            reason += f", {lost:.0%} fewer than without the draft"
    return Fit(fits, reason, room_gib, tokens, share, lost)


def _weights(held: Footprint) -> str:
    text = f"{held.weights_gib:.2f} GiB of weights"
    return text + (f" ({held.draft_gib:.2f} of the draft)" if held.draft_gib else "")


def _gpus_needed(held: Footprint, machine: Machine) -> int:
    """Return the smallest power of two of GPUs that holds the weights; 0 if none up to 64 does."""
    if machine.usable_gib <= 0:
        return 0
    needed = 2 ** math.ceil(math.log2(held.weights_gib / machine.usable_gib + 1e-9))
    return needed if needed <= 64 else 0


def _bytes(dtype: str) -> float:
    if dtype not in BYTES:
        raise ValueError(f"no such dtype: {dtype!r}; known are {', '.join(BYTES)}")
    return BYTES[dtype]
