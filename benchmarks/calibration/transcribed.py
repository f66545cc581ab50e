"""Figures transcribed from repositories: Apertus on GH200, and the cost of verification on H100."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from benchmarks.calibration.cases import Case, Closed, Collected, Figure, Given, Group, LeftOut, Work
from benchmarks.calibration.cases import geometric_survival as geometric
from benchmarks.calibration.facts import config_of, rows

SMALL, LARGE = "llama-3.1-8b-gh200", "apertus-70b-4xgh200"
APERTUS = "apertus"

SERVED: Mapping[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "prefix_caching": False}

WORK = {
    # From the repository's summary files. Chat: 630 prompt and 190 answer tokens per request. Summarization: 2.8k
    # tokens of KV cache per running request and 200 answer tokens; the 3.8k in its text do not fit its KV use.
    "chat": Work("chat", prompt_tokens=630, output_tokens=190),
    "summarization": Work("summarization", prompt_tokens=2700, output_tokens=200, spread=0.3),
}

LARGE_WORK = {
    # 251 answer tokens per request over all settings; the prompts are not described.
    "open_chat": Work("chat", 150, 251),
    "code": Work("code", 150, 251),
    "long_context_summarization": Work("summarization", 2500, 251),
}
LARGE_REQUESTS = 24
LOOKUP_ACCEPTED = 0.6
"""Accepted tokens of an n-gram draft: between 0.38 and 0.80 in the settings of the 70B."""

QWEN_SHARE = {"parameters": 1.72 / 8.03, "kv": 112 / 128}
"""Parameters and KV bytes per token of Qwen3-1.7B, relative to Llama-3.1-8B."""


def read(folder: Path) -> Collected:
    """Return the contents of the transcribed tables."""
    collected = Collected()
    for source in (_draft_length, _plain_load, _sampling, _large, _verify_cost, _consumer):
        collected += source(folder)
    return collected


def _closed(concurrency: int) -> Closed:
    return Closed(concurrency, max(32, 4 * concurrency))


def _draft_length(folder: Path) -> Collected:
    cases: dict[Group, list[Case]] = {}
    for row in rows(folder / "apertus8b_gh200_draft_length.csv"):
        concurrency, method, k = int(row["concurrency"]), Method(row["drafter"]), int(row["k"])
        group = Group(SMALL, APERTUS, row["workload"], row["concurrency"])
        load, work = _closed(concurrency), WORK[row["workload"]]
        plain = Case(group, "baseline", Method.BASELINE, {}, load, work, {}, limits=SERVED)
        measured = {"speedup": float(row["throughput_vs_plain"])}
        cases.setdefault(group, [plain]).append(
            Case(group, f"{method} k={k}", method, config_of(method, k), load, work, measured, limits=SERVED)
        )
    return Collected([case for members in cases.values() for case in members])


def _plain_load(folder: Path) -> Collected:
    cases = []
    for row in rows(folder / "apertus8b_gh200_plain_summarization_load.csv"):
        measured = {
            "output_tok_s": float(row["output_tok_s"]),
            "ttft_median_ms": float(row["ttft_p50_s"]) * 1e3,
            "tpot_median_ms": float(row["tpot_p50_ms"]),
        }
        group = Group(SMALL, APERTUS, "summarization, plain load", row["concurrency"])
        load = _closed(int(row["concurrency"]))
        work = WORK["summarization"]
        cases.append(Case(group, "baseline", Method.BASELINE, {}, load, work, measured, limits=SERVED))
    return Collected(cases)


def _sampling(folder: Path) -> Collected:
    columns = {
        "chat_greedy_accepted": ("chat", 0.0),
        "chat_T0.7_p0.8_k20": ("chat", 0.7),
        "summ_greedy": ("summarization", 0.0),
        "summ_T0.7_p0.8_k20": ("summarization", 0.7),
    }
    cases = []
    for row in rows(folder / "apertus_sampling_effect.csv"):
        name, _, k = row["arm"].partition("_k")
        method = Method(name.lower())
        for column, (workload, temperature) in columns.items():
            cases.append(
                Case(
                    Group(SMALL, APERTUS, f"{workload}, T={temperature:g}, length", "1"),
                    f"{method} k={k}",
                    method,
                    config_of(method, int(k)),
                    Closed(16, 128),
                    WORK[workload],
                    {"tokens_per_step": float(row[column])},
                    temperature=temperature,
                    limits=SERVED,
                )
            )
    reason = (
        "the simulated acceptance depends only on the temperature, so top-k 20 or none beside top-p 0.8 changes nothing"
    )
    left_out = [LeftOut("apertus_sampling_effect.csv", "column chat_T0.7_p0.8_notopk", len(cases) // 4, reason)]
    return Collected(cases, left_out=left_out)


def _large(folder: Path) -> Collected:
    cases = []
    for row in rows(folder / "apertus70b_4xgh200_step_decomposition.csv"):
        concurrency = int(row["concurrency"])
        group = Group(LARGE, APERTUS, row["workload"], row["concurrency"])
        load, work = Closed(concurrency, LARGE_REQUESTS), LARGE_WORK[row["workload"]]
        plain_tok_s, plain_ms = float(row["baseline_tok_s"]), float(row["baseline_step_ms"])
        measured = {"output_tok_s": plain_tok_s, "step_ms": plain_ms}
        cases.append(Case(group, "baseline", Method.BASELINE, {}, load, work, measured))
        for method, step, speed in (
            (Method.NGRAM, "ngram_k3_step_ms", "ngram_tok_s"),
            (Method.DRAFT_MODEL, "draft8b_k3_step_ms_r1", "draft_tok_s"),
        ):
            measured = {"output_tok_s": float(row[speed]), "step_ms": float(row[step])}
            per_step = measured["output_tok_s"] * measured["step_ms"] / (plain_tok_s * plain_ms)
            given = _large_given(method, per_step)
            config = config_of(method, 3, lookup=(1, 4))
            cases.append(Case(group, f"{method} k=3", method, config, load, work, measured, given=given))
    reason = "second run of the draft model, without tokens/s: its steps take 1.03 to 1.10 times those of the first"
    left_out = [LeftOut("apertus70b_4xgh200_step_decomposition.csv", "draft8b_k3_step_ms_r2", 6, reason)]
    return Collected(cases, left_out=left_out)


def _large_given(method: Method, tokens_per_step: float) -> Given:
    accepted = tokens_per_step - 1
    if method is Method.DRAFT_MODEL:
        return Given(1.0, geometric(accepted, 3), 3)
    return Given(min(1.0, accepted / LOOKUP_ACCEPTED), geometric(max(accepted, LOOKUP_ACCEPTED), 3), 3)


def _verify_cost(folder: Path) -> Collected:
    step = load_calibration("llama-3.1-8b-h100").step
    context_s = step.per_context_token_s * QWEN_SHARE["kv"]
    token_s = step.per_token_above_knee_s * QWEN_SHARE["parameters"]
    base_s = step.base_s * QWEN_SHARE["parameters"] + step.overhead_s
    collected, eager = Collected(), 0
    for row in rows(folder / "h100_qwen3_1.7b_verify_cost.csv"):
        metric, requests = row["metric"], row["num_reqs"]
        simulated = {
            "delta_ms": lambda n: int(n) * 8192 * context_s * 1e3,
            "us_per_kv_token": lambda n: context_s * 1e6,
            "graphed_step_ms": lambda n: (base_s + int(n) * token_s) * 1e3,
            "ms_per_verified_token_graphed": lambda n: token_s * 1e3,
        }.get(metric)
        if simulated is None:
            eager += 1
            continue
        collected.figures.append(
            Figure(
                "h100_qwen3_1.7b_verify_cost.csv",
                f"Qwen3-1.7B from the 8B by size, {requests} requests, context {row['context']}",
                metric,
                float(row["value"]),
                simulated(requests),
            )
        )
    reason = "measured without CUDA graphs; no calibration describes an eager engine"
    collected.left_out.append(LeftOut("h100_qwen3_1.7b_verify_cost.csv", "eager", eager, reason))
    return collected


def _consumer(folder: Path) -> Collected:
    count = sum(1 for _ in rows(folder / "ieslab_summary.csv"))
    reason = (
        "n-gram at k 1 to 8, compared with itself: the rows have no baseline, no texts and no share of steps that "
        "drafted, so acceptance, the deciding figure, would have to be fitted on each row. A calibration of that GPU "
        "(RTX 3090) would rest on these rows alone"
    )
    return Collected(left_out=[LeftOut("ieslab_summary.csv", "K sweeps", count, reason)])
