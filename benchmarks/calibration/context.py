"""How well acceptance by context is simulated: `python -m benchmarks.calibration context FOLDER`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`, not part of the project): the tokens that a step
of the EAGLE-3 head of Llama-3.1-8B emits at each output position. The head was trained on up to 2,048 tokens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from backends.calibration.load import load_calibration
from backends.simulator.drafting.acceptance import model_based_replay
from backends.speculation import Method

RANGES = (1536, 2048, 2560, 3072, 4096, 6144, 131072)
DRAFTS = (3, 5)
REPETITIONS = 20
KINDS = {"cnn": "summarization", "gsm8k": "math", "instructcoder": "code", "sharegpt": "chat"}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request."""

    kind: str
    is_fitted: bool  # whether it is of the half that the shifts by context were fitted on
    prompt_tokens: int
    emitted: Sequence[int]  # by a step at each output position


def recorded(folder: Path) -> Iterator[Recorded]:
    """Yield the requests that grow beyond the first range."""
    for path in sorted(folder.glob("combined_*.jsonl.gz")):
        kind = KINDS[path.name.removeprefix("combined_").partition(".")[0]]
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                prompt, emitted = len(row["prompt_token_ids"]), (row.get("acc_eagle") or {}).get("acc_len", [])
                if prompt + len(emitted) > RANGES[0]:
                    half = int(sha256(str(row["id"]).encode()).hexdigest(), 16) % 2
                    yield Recorded(kind, half == 1, prompt, emitted)


def steps_of(request: Recorded, emitted: Sequence[int], k: int) -> Iterator[tuple[int, int]]:
    """Yield the context and the tokens of each step of k drafts; the last ones, which the end cuts, are left out."""
    position = 1
    while position < len(emitted) - k:
        tokens = min(int(emitted[position]), k + 1)
        yield request.prompt_tokens + position, tokens
        position += tokens


def contexts(folder: Path) -> Iterable[str]:
    """Yield tokens per step by half of the requests, k and range of contexts."""
    calibration, rng = load_calibration("llama-3.1-8b-h100"), np.random.default_rng(0)
    found = list(recorded(folder))
    for is_fitted in (True, False):
        half = [request for request in found if request.is_fitted is is_fitted]
        for k in DRAFTS:
            real = [list(steps_of(each, each.emitted, k)) for each in half]
            simulated = []
            for each in half:
                shape = each.kind, each.prompt_tokens, len(each.emitted)
                for _ in range(REPETITIONS):
                    drawn, _ = model_based_replay(rng, calibration, Method.EAGLE3, k, 0.0, *shape)
                    simulated += list(steps_of(each, drawn.tolist(), k))
            for low, high in pairwise(RANGES):
                requests = [[tokens for context, tokens in steps if low <= context < high] for steps in real]
                measured = [tokens for steps in requests for tokens in steps]
                ours = [tokens for context, tokens in simulated if low <= context < high]
                if not measured:
                    continue
                mean, model = np.mean(measured), np.mean(ours)
                place = f"{'fitted' if is_fitted else 'held out'} | {k} | {low:,} to {high:,}"
                counts = f"{sum(map(bool, requests))} | {len(measured):,}"
                yield f"{place} | {counts} | {mean:.2f} | {model:.2f} | {model / mean - 1:+.1%}"
