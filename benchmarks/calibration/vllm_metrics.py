"""Counters of vLLM 0.12 after 56 runs: four methods, several models and prompt sets, at most 8 concurrent requests."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from backends.speculation import Method
from benchmarks.calibration.cases import Case, Closed, Collected, Given, Group, LeftOut, Work
from benchmarks.calibration.facts import config_of, rows

SOURCE = "vllm012"
SETUPS = {
    "L31-8B-I": "llama-3.1-8b-lab012",
    "L31-70B-I": "llama-3.1-70b-lab012",
    "Qwen3-30B-A3B-I-2507": "qwen3-30b-a3b",
    "Qwen3-32B": "qwen3-32b",
}
METHODS = {
    "autoregressive": (Method.BASELINE, 0),
    "ngram": (Method.NGRAM, 5),
    "suffix": (Method.SUFFIX, 32),
    "eagle3": (Method.EAGLE3, 3),
    "eagle3 copy": (Method.EAGLE3, 5),
}
LIMIT = 8
REQUESTS = 96


def read(folder: Path) -> Collected:
    """Return the summary's cases; concurrency and prefix cache hits come from the metrics pages beside it."""
    collected = Collected()
    seen: set[tuple[str, ...]] = set()
    for row in rows(folder / "summary.csv"):
        counters = (row["dataset"], row["model"], row["gen_tokens"], row["drafts"], row["accepted"])
        if row["drafts"] and counters in seen:
            name = f"{row['dataset']} {row['model']} {row['method']}"
            reason = "same counters as the previous row: a copy, not another setting"
            collected.left_out.append(LeftOut("summary.csv", name, 1, reason))
            continue
        seen.add(counters)
        page = folder / "raw" / f"{row['dataset']}__{row['model']}__{row['method'].replace(' ', '_')}.prom.gz"
        collected.cases.append(_case(row, _Page(page)))
    collected.left_out.append(LeftOut("raw/*mlp*", "mlp", 3, "counters inconsistent; not in summary.csv either"))
    return collected


class _Page:
    """One page of metrics."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt", encoding="utf-8") as page:
            self._text = page.read()

    def __getitem__(self, name: str) -> float:
        match = re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", self._text, re.MULTILINE)
        if match is None:
            raise KeyError(name)
        return float(match[1])


def _case(row: dict[str, str], page: _Page) -> Case:
    method, k = METHODS[row["method"]]
    # The summary divides the tokens of completed requests by the drafts of all; with aborted requests that is too low.
    tokens_per_step = _tokens_per_step(page, drafting=bool(row["drafts"]))
    step_s = tokens_per_step / float(row["tok_s_per_request"])
    # Time that requests spent in the engine over the time of its iterations: the mean number of concurrent requests.
    concurrency = page["e2e_request_latency_seconds_sum"] / (page["iteration_tokens_total_count"] * step_s)
    requests = float(row["requests"])
    config = config_of(method, k, lookup=(4, 4))
    texts = {"canitedit": "canitedit", "mtbench": "mtbench"}.get(row["dataset"])
    return Case(
        group=Group(SETUPS[row["model"]], SOURCE, row["dataset"], f"<={LIMIT}"),
        label=f"{method} k={k}" if k else str(method),
        method=method,
        config=config,
        load=Closed(min(LIMIT, max(1, round(concurrency))), REQUESTS),
        work=Work(
            "chat" if row["dataset"] == "mtbench" else "code",
            prompt_tokens=float(row["prompt_tokens"]) / requests,
            output_tokens=float(row["gen_tokens"]) / requests,
            texts=f"{texts}-qwen3" if texts and row["model"].startswith("Qwen") else texts,
            shared=page["prefix_cache_hits_total"] / page["prefix_cache_queries_total"],
        ),
        measured={
            "tok_s_per_request": float(row["tok_s_per_request"]),
            "step_ms": step_s * 1e3,
            "tokens_per_step": tokens_per_step,
        },
        speed="tok_s_per_request",
        given=_given(row, page) if method is not Method.BASELINE else None,
        limits={"max_num_seqs": LIMIT},
    )


def _tokens_per_step(page: _Page, *, drafting: bool) -> float:
    accepted = page["spec_decode_num_accepted_tokens_total"] if drafting else 0.0
    return page["generation_tokens_total"] / (page["generation_tokens_total"] - accepted)


def _given(row: dict[str, str], page: _Page) -> Given:
    """Return the acceptance counted in a run: its drafts, and how many were accepted up to each position."""
    drafts, accepted = float(row["drafts"]), float(row["accepted"])
    steps = page["generation_tokens_total"] - accepted
    by_position = [count / drafts for count in json.loads(row["accepted_per_position"])]
    # The counters stop at position 12, while suffix decoding drafts up to 32 tokens; the rest is only in the total.
    beyond = max(0.0, accepted / drafts - sum(by_position))
    survival = [rate for rate in by_position if rate > 0]
    if beyond > 0.01:
        ratio = beyond / (beyond + survival[-1])
        survival += [survival[-1] * ratio**j for j in range(1, 21)]
    return Given(min(1.0, drafts / steps), tuple(survival), float(row["draft_tokens"]) / drafts)
