"""Drafts as deep as each request asks: `vllm serve --scheduler-cls vllm_draft_depth.Scheduler`.

A request says `"vllm_xargs": {"draft_tokens": k}`: at most k drafted tokens of it are verified in a step, none with 0.
Without it, or with what is no whole number from 0 on, as many as the engine is configured for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import SchedulerInterface

KNOWN = ((0, 32), (0, 33))
"""Versions of vLLM whose schedulers were read: their interface is internal, and may change with each."""


class Scheduler:
    """What vLLM calls to make its scheduler: the synchronous or the asynchronous one, as it is configured."""

    def __new__(cls, vllm_config: VllmConfig, **others: Any) -> SchedulerInterface:  # type: ignore[misc]
        """Return a scheduler, or refuse a version or a configuration in which it might cut wrongly."""
        if why := _why_not(vllm_config):
            raise ValueError(f"--scheduler-cls vllm_draft_depth.Scheduler cannot serve here: {why}")
        from vllm_draft_depth.schedulers import Asynchronous, Synchronous  # only of a version that is known

        kind = Asynchronous if vllm_config.scheduler_config.async_scheduling else Synchronous
        return kind(vllm_config=vllm_config, **others)


def _why_not(vllm_config: VllmConfig) -> str:
    """Return why drafts cannot be cut; empty if they can."""
    if vllm.__version_tuple__[:2] not in KNOWN:
        known = " and ".join(f"{major}.{minor}" for major, minor in KNOWN)
        return f"this is vLLM {vllm.__version__}, and it knows {known}"
    if vllm_config.model_config.is_diffusion:
        return "a diffusion model has no drafts to cut"
    if vllm_config.model_config.has_inner_state:
        return "it was not tried with models that keep a state beside the KV cache, such as Mamba's"
    if getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        return "with enable_adaptive_verification the engine itself shares out the drafts"
    return ""
