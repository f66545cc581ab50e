"""aiperf."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.load import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, STREAMS, TOKENIZER, Figures, Run, run_tool
from tests.clients.report import KEY, MODEL, URL, report


def measure(folder: Path) -> Figures:
    run_tool(
        "aiperf",
        "profile",
        *("--model", MODEL, "--url", URL, "--api-key", KEY, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", TOKENIZER, "--concurrency", STREAMS, "--request-count", REQUESTS),
        *("--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", OUTPUT_TOKENS),
        *("--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", folder),
    )
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    return Figures(
        requests=int(report["completed_request_count"]["avg"]),
        failed=int(report["request_count"]["avg"] - report["completed_request_count"]["avg"]),
        output_tokens=int(report["total_usage_completion_tokens"]["avg"]),
        ttft_ms=report["time_to_first_token"]["avg"],
        tpot_ms=report["inter_token_latency"]["avg"],  # what others call TPOT
    )


report("aiperf", Run(measure).cases)
