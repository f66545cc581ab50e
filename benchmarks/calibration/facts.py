"""The published figures: serving_online.csv, throughput_offline.csv and the tables beside them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from benchmarks.calibration.cases import Case, Closed, Collected, Figure, Given, Group, LeftOut, Open, Work
from benchmarks.calibration.cases import geometric_survival as geometric

LAB, GUIDE, BLOG, ILLUSION = "vllm-0.19-lab", "vllm-0.12-guide", "vllm-blog-2024", "sd-illusion"
DEFAULT_TEMPERATURE = 0.6  # in Llama-3.1's generation_config, vLLM's default

SETUPS = {
    (LAB, "1xH200", "llama-3.1-8b-instruct"): "llama-3.1-8b-h200-lab019",
    (LAB, "1xH100", "llama-3.1-8b-instruct"): "llama-3.1-8b-h100-lab019",
    (LAB, "4xH100 tp4", "llama-3.1-70b"): "llama-3.1-70b-4xh100",
    (LAB, "4xH100", "llama-3.1-70b"): "llama-3.1-70b-4xh100",
    (LAB, "2xH200", "llama-3.1-70b"): "llama-3-70b-2xh200",
    (GUIDE, "1xL40S", "llama-3.1-8b-instruct"): "llama-3.1-8b-l40s",
    (GUIDE, "2xH200 tp2", "llama-3.3-70b-instruct"): "llama-3.3-70b-2xh200-guide012",
}

RANDOM_BATCH = 8
"""Concurrent requests in the lab's offline runs, which is not published: 8 gives 1,086 tokens/s on the H100 with its
own 6.7 ms per step."""

RANDOM_TOKENS_PER_STEP = {
    ("8b", Method.DRAFT_MODEL): 1.68,
    ("8b", Method.NGRAM): 1.28,
    ("70b", Method.DRAFT_MODEL): 1.80,
    ("70b", Method.NGRAM): 1.19,
}
"""Acceptance on random prompts, which was not published: one number per target and method, chosen to match the fitting
part's rows (H200); the rows on H100 are reported with it."""

ACCEPTED_PER_DRAFT = 2.4
"""Accepted tokens per successful prompt lookup, k=5: 48.62% of its drafts (the lab, ShareGPT). It converts tokens per
step into the share of steps that draft, where only the former was published."""

SWE = Work("code", prompt_tokens=1500, output_tokens=300, texts="instructcoder")
"""SWE-bench-lite: neither lengths nor texts are available; estimated lengths, and another code-editing set."""

EAGLE_BY_BATCH = {1: 1.73, 128: 1.21}
"""arXiv 2601.11580: EAGLE's speedup on Llama-3.1-8B, H100, by batch size."""


def read(facts: Path) -> Collected:
    """Return the contents of the directory of published figures."""
    collected = Collected()
    for source in (online, _offline, _generated_length, _by_batch, _temperature, _memory):
        collected += source(facts)
    return collected


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table by column name."""
    with path.open(encoding="utf-8", newline="") as table:
        yield from csv.DictReader(table)


def method_of(name: str) -> Method:
    """Return the method that a source calls `name`, possibly followed by a draft or a setting in parentheses."""
    return Method(name.partition("(")[0])


def config_of(method: Method, k: int, lookup: tuple[int, int] = (2, 4)) -> dict[str, Any]:
    """Return vLLM's speculative_config."""
    if method is Method.BASELINE:
        return {}
    if method is Method.NGRAM:
        return {"num_speculative_tokens": k, "prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[1]}
    return {"num_speculative_tokens": k} if k else {}


def drafting_given(method: Method, k: int, tokens_per_step: float) -> Given:
    """Return the acceptance that emits `tokens_per_step`, where nothing else is known about it."""
    accepted = max(0.0, tokens_per_step - 1)
    if method is Method.NGRAM:
        per_draft = min(ACCEPTED_PER_DRAFT, 0.8 * k)
        return Given(min(1.0, accepted / per_draft), geometric(max(per_draft, accepted), k), k)
    if method is Method.SUFFIX:  # drafts in 83% to 99% of the steps in the metrics of vLLM 0.12
        share = 0.9
        return Given(share, geometric(accepted / share, 12), 2 * accepted / share)
    return Given(1.0, geometric(accepted, k), k)


def online(facts: Path) -> Collected:
    """Return the cases of serving_online.csv: Poisson arrivals, median times."""
    collected = Collected()
    for row in rows(facts / "serving_online.csv"):
        method, k = method_of(row["method"]), int(row["k"])
        default = row["temperature"] == "server default"
        temperature = DEFAULT_TEMPERATURE if default else float(row["temperature"])
        setup = SETUPS[row["source"], row["hardware"], row["target"]]
        measured = {f"{name}_median_ms": float(row[f"{name}_median_ms"]) for name in ("itl", "ttft")}
        given = None
        if row["acceptance_rate"] and method is not Method.NGRAM:
            given = drafting_given(method, k, 1 + k * float(row["acceptance_rate"]))
            measured["tokens_per_step"] = given.tokens_per_step
        collected.cases.append(
            Case(
                group=Group(setup, row["source"], f"{row['workload']}, T={temperature:g}", f"{row['request_rate']}/s"),
                label=f"{method} k={k}" if k else str(method),
                method=method,
                config=config_of(method, k),
                load=Open(float(row["request_rate"]), 300),
                work=Work("chat", texts="sharegpt-served"),
                measured=measured,
                speed="itl_median_ms",
                inverse=True,
                temperature=temperature,
                given=given,
            )
        )
    collected.left_out.append(
        LeftOut("serving_online.csv", "columns ttft_p99_ms, itl_p99_ms, output_tok_s", 4, _WHY_NOT_P99)
    )
    return collected


_WHY_NOT_P99 = (
    "four rows have these columns: the 99th percentiles come from warm-up and bursts that are not described; tokens/s "
    "at a fixed rate is the rate times the answer length, which is an input here"
)


def _offline(facts: Path) -> Collected:
    collected, blog = Collected(), 0
    for row in rows(facts / "throughput_offline.csv"):
        if row["source"] == BLOG:
            blog += 1
            continue
        method, k = method_of(row["method"]), int(row["k"] or 0)
        setup = SETUPS[row["source"], row["hardware"], row["target"]]
        measured = {"output_tok_s": float(row["output_tok_s"])}
        given = None
        if row["concurrency"] == "offline":
            measured = {} if method is Method.BASELINE else {"speedup": float(row["speedup"])}
            load, work = Closed(RANDOM_BATCH, 8 * RANDOM_BATCH), Work("chat", 512, 128, spread=0.0)
            if method is not Method.BASELINE:
                size = "70b" if "70b" in row["target"] else "8b"
                given = drafting_given(method, k, RANDOM_TOKENS_PER_STEP[size, method])
        else:
            chat = row["workload"] == "sharegpt"
            load, work = Closed(int(row["concurrency"]), 100), Work("chat", texts="sharegpt-served") if chat else SWE
            if row["mean_itl_ms"]:
                measured["step_ms"] = float(row["mean_itl_ms"])
            if row["mean_tpot_ms"]:
                measured["tpot_mean_ms"] = float(row["mean_tpot_ms"])
                tokens_per_step = float(row["mean_itl_ms"]) / float(row["mean_tpot_ms"])
                measured["tokens_per_step"] = tokens_per_step
                given = drafting_given(method, k, tokens_per_step)
        collected.cases.append(
            Case(
                group=Group(setup, row["source"], row["workload"], row["concurrency"]),
                label=f"{method} k={k}" if k else str(method),
                method=method,
                config=config_of(method, k, lookup=(4, 4) if "lookup_max=4" in row["method"] else (2, 4)),
                load=load,
                work=work,
                measured=measured,
                given=given,
            )
        )
    reason = "runs on random prompts: the concurrency is not stated, so only ratios are compared"
    collected.left_out.append(LeftOut("throughput_offline.csv", "column output_tok_s", 12, reason))
    reason = "vLLM 0.6 (a different engine); k, acceptance and the high rate are not stated"
    collected.left_out.append(LeftOut("throughput_offline.csv", BLOG, blog, reason))
    return collected


def _generated_length(facts: Path) -> Collected:
    # Means over the positions of a request: SpecDecode-Bench's recordings give 7.66, 2.61, 2.79 and 1.42 for n-gram
    # where 7.27, 2.33, 2.02 and 1.41 are published (with those of the 70B), while its steps emit 1.2 to 2.2.
    collected = Collected()
    kinds = {"instructcoder": "code", "cnn_dailymail": "summarization", "sharegpt": "chat", "gsm8k": "math"}
    for row in rows(facts / "generated_length_by_dataset.csv"):
        method = Method(row["method"])
        thinking = row["dataset"] not in kinds
        if thinking and method is Method.NGRAM:
            reason = "no answers of a reasoning model were available for n-gram lookup"
            collected.left_out.append(LeftOut("generated_length_by_dataset.csv", f"{row['dataset']} ngram", 1, reason))
            continue
        work = Work("reasoning", 200, 4000) if thinking else Work(kinds[row["dataset"]], texts=row["dataset"])
        collected.cases.append(
            Case(
                group=Group(
                    "qwen3-8b-h100" if thinking else "llama-3.1-8b-h100", ILLUSION, f"{row['dataset']}, length", "1"
                ),
                label=f"{method} k=20",
                method=method,
                config=config_of(method, 20, lookup=(3, 7)),
                load=Closed(8, 24 if thinking else 150),
                work=work,
                measured={"emitted_at_positions": float(row["mean"])},
            )
        )
    return collected


def _by_batch(_: Path) -> Collected:
    cases = []
    for batch, speedup in EAGLE_BY_BATCH.items():
        group = Group("llama-3.1-8b-h100", ILLUSION, "sharegpt, speedup", f"{batch}")
        load, work = Closed(batch, max(24, 3 * batch)), Work("chat", texts="sharegpt-served")
        cases += [
            Case(group, "baseline", Method.BASELINE, {}, load, work, {}),
            Case(group, "eagle k=3", Method.EAGLE, config_of(Method.EAGLE, 3), load, work, {"speedup": speedup}),
        ]
    return Collected(cases)


def _temperature(facts: Path) -> Collected:
    table = list(rows(facts / "acceptance_by_temperature.csv"))
    greedy = float(table[0]["acceptance_rate"])
    curve = load_calibration("llama-3.1-8b-h100").temperature
    return Collected(
        figures=[
            Figure(
                "acceptance_by_temperature.csv",
                f"draft model, T={float(row['temperature']):g}",
                "acceptance",
                float(row["acceptance_rate"]),
                greedy * curve.factor(float(row["temperature"])),
            )
            for row in table
        ]
    )


def _memory(facts: Path) -> Collected:
    setups = {
        "llama-3.1-8b": "llama-3.1-8b-h100",
        "llama-3-70b": "llama-3-70b-2xh200",
        "qwen3-8b": "qwen3-8b-h100",
    }
    collected = Collected()
    for row in rows(facts / "memory.csv"):
        calibration = load_calibration(setups[row["target"]])
        method = Method(row["method"].partition("|")[0])
        entry, what = calibration.method(method), f"{row['target']} {row['method'].replace('|', ', ')}"
        weights = calibration.memory.weights_gib + entry.weights_gib
        per_token = calibration.memory.kv_kib_per_token + entry.kv_kib_per_token
        collected.figures += [
            Figure("memory.csv", what, "weights, GiB", float(row["static_gib_fp16"]), weights),
            Figure("memory.csv", what, "KV, KiB a token", float(row["kv_kib_per_token"]), per_token),
        ]
    shapes = sum(1 for _ in rows(facts / "model_specs.csv"))
    reason = (
        "model shapes, from which memory.csv follows (2 bytes a parameter; layers x 2 x heads x dimension x 2 bytes)"
    )
    collected.left_out.append(LeftOut("model_specs.csv", "all", shapes, reason))
    return collected
