"""Recorded requests with the cost of each under every method; input of `benchmarks.routing.threshold_rules`.

The recordings are not part of the project. They are the data of SpecDecode-Bench's simulator (arXiv 2601.11580):
Llama-3.1-8B on one H100, greedy, with engine steps, verified tokens and context read per request and method.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from backends.speculation import Method
from benchmarks.routing.ground import recording_id
from policies.features.request import Endpoint, RequestFeatures, describe
from policies.split import part_of

ARMS = {Method.BASELINE: "base", Method.NGRAM: "ngram5", Method.SUFFIX: "suffix", Method.EAGLE3: "eagle3_3"}
"""The methods, and the column that holds each one's recording."""

DECLARED = {"sharegpt": "chat", "instructcoder": "code"}
"""The workloads that clients of these datasets could declare."""


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of one request under a method: engine steps, tokens verified, and context tokens read."""

    steps: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request."""

    dataset: str
    features: RequestFeatures
    output_tokens: int
    work: dict[Method, Work]

    def alone_s(self, method: Method) -> float:
        """Return the seconds that the request takes on an idle engine, without its prefill."""
        work = self.work[method]
        return step_s(method, 1, work.tokens / work.steps, work.context / work.steps) * work.steps


def step_s(method: Method, requests: int, tokens: float, context: float) -> float:
    """Return the seconds of an engine step.

    The fit is that of the same simulator (its `predictor.py`): a step reads the weights, verifies `tokens` against
    `context` tokens of KV cache, drafts, and has the engine's overhead.
    """
    if not requests:
        return 0.0
    verify = 5.886e-3 + 2.101e-5 * tokens + 3.926e-8 * context
    draft = {
        Method.EAGLE3: 2.135e-3 + 8.414e-7 * tokens + 2.378e-9 * context,
        Method.NGRAM: 0.005875 * verify,
        Method.SUFFIX: 0.005875 * verify,
    }
    return verify + draft.get(method, 0.0) + 1.207e-3


def read(folder: Path, part: int, *, declare: bool) -> list[Recorded]:
    """Return one part of the recordings of a folder (`derived_per_request.csv.gz`, `combined_*.jsonl.gz`).

    Parameters
    ----------
    declare
        Whether clients declare their workload, if the dataset is in `DECLARED`.
    """
    prompts = {}
    for path in sorted(folder.glob("combined_*.jsonl.gz")):
        dataset = path.name.removeprefix("combined_").removesuffix(".jsonl.gz")
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                prompts[dataset, str(row["id"])] = row["prompt_token_ids"]
    with gzip.open(folder / "derived_per_request.csv.gz", "rt", encoding="utf-8", newline="") as table:
        return [
            _recorded(row, prompts[row["dataset"], row["id"]], declare)
            for row in csv.DictReader(table)
            if part_of(recording_id(row["dataset"], row["id"])) == part
        ]


def _recorded(row: dict[str, str], prompt: list[int], declare: bool) -> Recorded:
    features = describe(
        Endpoint.COMPLETIONS,
        {"prompt": prompt, "temperature": 0, "max_tokens": None},
        model="llama-3.1-8b",
        default_temperature=0.0,
        qps=0.0,
        in_flight=0,
        workload=DECLARED.get(row["dataset"], "") if declare else "",
    )
    work = {
        method: Work(int(row[f"{arm}.steps"]), int(row[f"{arm}.vtok"]), int(row[f"{arm}.kv"]))
        for method, arm in ARMS.items()
    }
    return Recorded(row["dataset"], features, int(row["output_tokens"]), work)
