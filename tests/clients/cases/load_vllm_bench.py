"""`vllm bench serve`: what it reports beside the gateway's own counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from tests.clients.counters import Totals, totals
from tests.clients.report import KEY, MODEL, URL, check, report

REQUESTS, STREAMS = 40, 4
NEAR = 1.5
SLACK_MS = 20.0  # a client's own time, on a busy machine


def measure(folder: Path) -> dict[str, Any]:
    """Run the tool, its output on stderr, and return its report."""
    command = (
        *(str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai-chat", "--base-url", URL),
        *("--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", os.environ["CLIENTS_TOKENIZER"]),
        *("--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "64", "--ignore-eos"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS)),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "report.json"),
    )
    env = os.environ | {"OPENAI_API_KEY": KEY}
    subprocess.run(command, check=True, stdout=sys.stderr, stderr=sys.stderr, timeout=240, env=env)
    reported: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return reported


def completes(reported: dict[str, Any], counted: Totals) -> str:
    """Check that every request succeeded, as the tool and the gateway see it."""
    check((reported["completed"], reported["failed"]) == (REQUESTS, 0), reported)
    # It asks for /tokenize before it begins, without its key, and does without the answer.
    check((counted.ok, counted.other) == (REQUESTS, 1), counted)
    return f"{reported['completed']} requests; the gateway counted {counted.ok}"


def tokens(reported: dict[str, Any], counted: Totals) -> str:
    """Check that the tool has received the tokens that the gateway has counted."""
    received = reported["total_output_tokens"]
    # A tool that counts by tokenizing the text may find a token more or less in it.
    check(abs(received - counted.output_tokens) <= REQUESTS // 10, (received, counted))
    return f"{received} output tokens; the gateway counted {counted.output_tokens}"


def times(reported: dict[str, Any], counted: Totals) -> str:
    """Check that the tool's mean times are near the gateway's."""
    ttft_ms, tpot_ms = reported["mean_ttft_ms"], reported["mean_tpot_ms"]
    for own, ours in ((ttft_ms, counted.ttft_ms), (tpot_ms, counted.tpot_ms)):
        check(ours / NEAR - SLACK_MS <= own <= ours * NEAR + SLACK_MS, (own, ours))
    return (
        f"TTFT {ttft_ms:.1f} ms (gateway {counted.ttft_ms:.1f} ms), "
        f"TPOT {tpot_ms:.2f} ms (gateway {counted.tpot_ms:.2f} ms)"
    )


def main() -> None:
    before = totals()
    with tempfile.TemporaryDirectory() as folder:
        reported = measure(Path(folder))
    counted = totals().since(before)
    cases = {case.__name__: lambda case=case: case(reported, counted) for case in (completes, tokens, times)}
    report(packages_distributions()["vllm"][0], cases)


main()
