"""guidellm."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.load import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, STREAMS, TOKENIZER, Figures, Run, run_tool
from tests.clients.report import KEY, MODEL, URL, report


def measure(folder: Path) -> Figures:
    report = folder / "report.json"
    run_tool(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY}"),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console-interactive",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    counts = metrics["request_totals"]
    return Figures(
        requests=counts["successful"],
        failed=counts["errored"] + counts["incomplete"],
        output_tokens=int(metrics["output_token_count"]["successful"]["total_sum"]),
        ttft_ms=metrics["time_to_first_token_ms"]["successful"]["mean"],
        tpot_ms=metrics["inter_token_latency_ms"]["successful"]["mean"],  # what others call TPOT
    )


report("guidellm", Run(measure).cases)
