"""`vllm bench serve`."""

from __future__ import annotations

import json
import os
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.clients.load import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, STREAMS, TOKENIZER, Figures, Run, run_tool
from tests.clients.report import KEY, MODEL, URL, report


def measure(folder: Path) -> Figures:
    os.environ["OPENAI_API_KEY"] = KEY
    run_tool(
        "vllm",
        *("bench", "serve", "--backend", "openai-chat", "--base-url", URL, "--endpoint", "/v1/chat/completions"),
        *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random"),
        *("--random-input-len", PROMPT_TOKENS, "--random-output-len", OUTPUT_TOKENS, "--ignore-eos"),
        *("--num-prompts", REQUESTS, "--max-concurrency", STREAMS),
        *("--save-result", "--result-dir", folder, "--result-filename", "report.json"),
    )
    report = json.loads((folder / "report.json").read_text())
    return Figures(
        requests=report["completed"],
        failed=report["failed"],
        output_tokens=report["total_output_tokens"],
        ttft_ms=report["mean_ttft_ms"],
        tpot_ms=report["mean_tpot_ms"],
    )


# It asks for /tokenize before it begins, without its key, and does without the answer.
report(packages_distributions()["vllm"][0], Run(measure, refused=1).cases)
