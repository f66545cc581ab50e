"""CPU time of vLLM's own lookups by batch: `python -m benchmarks.drafters RECORDINGS` in an environment with vLLM.

n-gram and suffix drafting run on the host, between two steps of the GPU. This runs vLLM's proposers on recorded answers
of SpecDecode-Bench (`combined_*.jsonl.gz`): each request of a batch goes on from the middle of its answer, by what its
draft and the recorded tokens agree in. The figure is the CPU time of a step of the batch, the median of 16. It holds no
time in which the GPU waits for the sampled tokens, as it does with both methods: what a step takes longer is more.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

_STEPS = 16
_MOST_TOKENS = 16_384
_BATCHES = (1, 8, 32, 64, 128, 256)
_K = {"ngram": 4, "suffix": 24}
_CACHED = (0, 100, 500)
"""Answers of other requests in the tree that all share."""


class Request:
    """A request in the midst of its answer."""

    def __init__(self, number: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.id, self.prompt, self.answer = f"r{number}", prompt, answer
        self.sent = len(answer) // 2
        self.sampled: list[int] = []

    def go_on(self, draft: Sequence[int]) -> None:
        """Take the drafted tokens that are the recorded ones, and one more."""
        rest = self.answer[self.sent :]
        accepted = next((n for n, (one, other) in enumerate(zip(draft, rest, strict=False)) if one != other), None)
        end = min(len(rest), 1 + (min(len(draft), len(rest)) if accepted is None else accepted))
        self.sampled = list(rest[:end])
        self.sent += end


def recorded(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers as tokens, those that a batch can decode for long enough."""
    found = []
    for path in sorted(folder.glob("combined_*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            found += [(row["prompt_token_ids"], row["generated_token_ids"]) for row in map(json.loads, lines)]
    random.Random(0).shuffle(found)
    return [each for each in found if len(each[1]) >= 10 * _STEPS and sum(map(len, each)) < _MOST_TOKENS]


def config(k: int) -> Any:
    """Return vLLM's defaults of what the proposers read."""
    speculative = SimpleNamespace(
        num_speculative_tokens=k, prompt_lookup_min=3, prompt_lookup_max=5, suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=10_000, suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    )  # fmt: skip
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(max_model_len=_MOST_TOKENS),
        scheduler_config=SimpleNamespace(max_num_seqs=max(_BATCHES)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def step_s(propose: Callable[[list[list[int]], Any], list[list[int]]], requests: Sequence[Request]) -> float:
    """Return the median CPU seconds of a step."""
    tokens = np.zeros((len(requests), _MOST_TOKENS), np.int32)
    lengths = np.zeros(len(requests), np.int32)
    batch = SimpleNamespace(
        req_ids=[each.id for each in requests],
        req_id_to_index={each.id: index for index, each in enumerate(requests)},
        num_prompt_tokens=np.array([len(each.prompt) for each in requests]),
        num_tokens_no_spec=lengths,
        token_ids_cpu=tokens,
    )
    for index, each in enumerate(requests):
        start = [*each.prompt, *each.answer[: each.sent]]
        each.sampled = start[len(each.prompt) :]  # the first call enters all of it into the tree
        tokens[index, : len(start)], lengths[index] = start, len(start)
    taken_s = []
    for _ in range(_STEPS + 1):
        begun_s = time.thread_time()
        drafts = propose([each.sampled for each in requests], batch)
        taken_s.append(time.thread_time() - begun_s)
        for index, (each, draft) in enumerate(zip(requests, drafts, strict=True)):
            each.go_on(draft)
            tokens[index, lengths[index] : lengths[index] + len(each.sampled)] = each.sampled
            lengths[index] += len(each.sampled)
    return median(taken_s[1:])


def _ngram(proposer: Any, k: int, sampled: list[list[int]], batch: Any) -> list[list[int]]:
    return proposer.propose(k, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)  # type: ignore[no-any-return]


def _suffix(proposer: Any, k: int, sampled: list[list[int]], batch: Any) -> list[list[int]]:
    return proposer.propose(k, batch, sampled)  # type: ignore[no-any-return]


def main() -> None:
    """Print the times as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    folder = parser.parse_args().recordings
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    known = recorded(folder)
    print(
        f"{len(known)} recorded answers\n\n| drafter | answers in the tree | batch | CPU ms a step |\n|---|---|---|---|"
    )
    for method, cached in [("ngram", 0), *[("suffix", count) for count in _CACHED]]:
        k = _K[method]
        for size in _BATCHES:
            requests = [Request(number, *each) for number, each in enumerate(known[:size])]
            if method == "ngram":
                taken_s = step_s(partial(_ngram, NgramProposer(config(k)), k), requests)
            else:
                suffix = SuffixDecodingProposer(config(k))
                for number, (prompt, answer) in enumerate(known[size : size + cached]):
                    suffix.suffix_cache.start_request(f"c{number}", prompt)
                    suffix.suffix_cache.add_active_response(f"c{number}", answer)
                    suffix.suffix_cache.stop_request(f"c{number}")
                taken_s = step_s(partial(_suffix, suffix, k), requests)
            print(f"| {method} | {cached or '-'} | {size} | {1e3 * taken_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
