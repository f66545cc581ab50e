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

REQUESTS, STREAMS = 16, 8


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


def completes(reported: dict[str, Any], counted: Totals) -> None:
    """Check that every request succeeded, as the tool and the gateway see it."""
    check((reported["completed"], reported["failed"]) == (REQUESTS, 0), reported)
    # It asks for /tokenize before it begins, without its key, and does without the answer.
    check((counted.ok, counted.other) == (REQUESTS, 1), counted)


def tokens(reported: dict[str, Any], counted: Totals) -> None:
    """Check that the tool has received the tokens that the gateway has counted."""
    received = reported["total_output_tokens"]
    # A tool that counts by tokenizing the text may find a token more or less in it.
    check(abs(received - counted.output_tokens) <= REQUESTS // 4, (received, counted))


def main() -> None:
    before = totals()
    with tempfile.TemporaryDirectory() as folder:
        reported = measure(Path(folder))
    counted = totals().since(before)
    cases = {case.__name__: lambda case=case: case(reported, counted) for case in (completes, tokens)}
    report(packages_distributions()["vllm"][0], cases)


main()
