"""Drives a scheduler of vLLM as its engine does, with a worker that knows what it will answer; run where vLLM is."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, NamedTuple

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

K = 4
PROMPT_TOKENS = 33
BLOCK_TOKENS = 16
IN_FLIGHT = 2
"""Steps that an engine with asynchronous scheduling has under way at a time."""


class Step(NamedTuple):
    """A step that is scheduled: what the worker is told, and which requests are still in their prompt after it."""

    output: Any
    in_prompt: frozenset[str]


def configuration(*, asynchronous: bool) -> VllmConfig:
    """Return the configuration of an engine with a draft model."""
    model = ModelConfig(model=".cache/tiny-models/target", dtype="float32", max_model_len=2048)
    parallel = ParallelConfig()
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=2048, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=False),
        parallel_config=parallel,
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=".cache/tiny-models/draft",
            num_speculative_tokens=K,
            target_model_config=model,
            target_parallel_config=parallel,
        ),
    )
    config.scheduler_config.async_scheduling = asynchronous  # which on the CPU is off, whatever one asks for
    return config


def scheduler_of(make: Any, *, asynchronous: bool, runner: int, blocks: int) -> Any:
    """Return the scheduler that `make` makes, for the first or second generation of vLLM's model runner."""
    config = configuration(asynchronous=asynchronous)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = runner == 2
    return scheduler


class Worker:
    """Answers request i with the tokens i, i + 1, i + 2 and so on, and accepts as many drafts as chance has it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._told: dict[str, int] = {}
        self.depths: dict[str, list[int]] = {}

    def run(self, step: Step) -> ModelRunnerOutput:
        """Return what a step gives."""
        ids = list(step.output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=[[] if one in step.in_prompt else self._sampled(one, step.output) for one in ids],
        )

    def _sampled(self, one: str, output: Any) -> list[int]:
        drafts = len(output.scheduled_spec_decode_tokens.get(one, ()))
        if one in self._told:
            self.depths.setdefault(one, []).append(drafts)
            assert output.num_scheduled_tokens[one] == 1 + drafts or drafts == 0, "drafts without their places"
        told = self._told.get(one, 0)
        self._told[one] = told + 1 + self._random.randint(0, drafts)
        return [int(one) + at for at in range(told, self._told[one])]


def drive(
    make: Any, asked: list[object], *, asynchronous: bool, runner: int = 2, blocks: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Serve a request for each depth that is asked to its end; return what was drafted, answered and left over."""
    init_none_hash(sha256)
    scheduler = scheduler_of(make, asynchronous=asynchronous, runner=runner, blocks=blocks)
    requests = []
    for index, depth in enumerate(asked):
        extra = {} if depth is None else {"draft_tokens": depth}
        params = SamplingParams(max_tokens=50 + index, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, 2)
        requests.append(
            Request(str(index), [9] * PROMPT_TOKENS, params, None, block_hasher=get_request_block_hasher(16, sha256))
        )
        scheduler.add_request(requests[-1])

    worker, under_way, counted, steps = Worker(seed), deque[Step](), 0, 0
    while scheduler.has_requests():
        steps += 1
        assert steps < 10_000, "no end of it"
        output = scheduler.schedule()
        if output.total_num_scheduled_tokens:
            in_prompt = [one for one in output.num_scheduled_tokens if scheduler.requests[one].is_prefill_chunk]
            under_way.append(Step(output, frozenset(in_prompt)))
            if asynchronous and len(under_way) < IN_FLIGHT:
                continue
        if not under_way:
            continue  # what has ended is told to the worker alone
        step = under_way.popleft()
        for answer in scheduler.update_from_output(step.output, worker.run(step)).values():
            if answer.scheduler_stats is not None and answer.scheduler_stats.spec_decoding_stats is not None:
                counted += answer.scheduler_stats.spec_decoding_stats.num_draft_tokens
        if not asynchronous:
            ids = list(step.output.num_scheduled_tokens)
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [[5] * K for _ in ids]))
    return {
        "kind": type(scheduler).__mro__[1].__name__,
        "depths": [worker.depths[request.request_id] for request in requests],
        "right": [
            list(request.output_token_ids) == [index + at for at in range(50 + index)]
            for index, request in enumerate(requests)
        ],
        "preemptions": sum(request.num_preemptions for request in requests),
        "usage": scheduler.kv_cache_manager.usage,
        "counted": counted,
        "steps": steps,
    }
