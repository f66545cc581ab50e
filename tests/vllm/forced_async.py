"""A real engine on the CPU with asynchronous scheduling, which vLLM switches off there: what it drafts.

Run where vLLM is: the engine, its scheduler and its worker are vLLM's own, only the choice of the platform is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

PROMPT = "def merge(a, b):\n    "
TOKENS = 100


@contextmanager
def forced_async() -> Iterator[None]:
    """Keep the platform from turning asynchronous scheduling off."""
    checked = CpuPlatform.check_and_update_config

    def forced(config: Any) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(forced)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = checked


def drafted(speculative_config: dict[str, Any], depths: list[int | None]) -> dict[str, Any]:
    """Serve a request of each depth in one batch; return what was drafted and answered."""
    with forced_async():
        engine = LLM(
            model=".cache/tiny-models/target",
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=16,
            enforce_eager=True,
            enable_prefix_caching=False,
            speculative_config=speculative_config,
            scheduler_cls="vllm_draft_depth.Scheduler",
        )
    core = engine.llm_engine.engine_core.engine_core
    steps: list[dict[str, int]] = []
    schedule = core.scheduler.schedule

    def watched(*given: Any) -> Any:
        output = schedule(*given)
        drafts = output.scheduled_spec_decode_tokens
        steps.append({one.split("-")[0]: len(drafts.get(one, ())) for one in output.num_scheduled_tokens})
        return output

    core.scheduler.schedule = watched
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            ignore_eos=True,
            extra_args=None if depth is None else {"draft_tokens": depth},
        )
        for depth in depths
    ]
    answers = engine.generate([PROMPT] * len(depths), params, use_tqdm=False)
    return {
        "scheduler": type(core.scheduler).__name__,
        "worker_is_async": core.model_executor.driver_worker.worker.model_runner.use_async_scheduling,
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "drafts": [[step[answer.request_id] for step in steps if answer.request_id in step] for answer in answers],
        "most_in_a_step": max(map(len, steps)),
    }
