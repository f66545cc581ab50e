"""Implementation of `gateway bench`."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console

from backends.validation import UsageError
from gateway import __version__
from gateway.config.load import load_pool
from lab.bench.arrivals import read_trace
from lab.bench.datasets import read_dataset, token_counter
from lab.bench.report.page import bench_page
from lab.bench.report.progress import TerminalWatcher
from lab.bench.report.results import SCHEMA, Report
from lab.bench.report.table import print_report
from lab.bench.settings import BenchSettings, read_settings, unknown
from lab.bench.sweep import Inputs, Outcome, Sweep, cells
from lab.bench.targets import Target, endpoint_targets, pool_targets

_INTERRUPTED = 130
_SECRET_OPTIONS = ("--api-key", "--header")


def bench(**options: Any) -> int:
    """Run a benchmark with the options of the command line."""
    settings = read_settings(**options)
    targets = _targets(settings)
    inputs = _inputs(settings)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = _measure(settings, targets, inputs)
    report = Report(
        schema=SCHEMA,
        version=__version__,
        created=created,
        command=_shown_command(sys.argv),
        settings=settings.model_dump(mode="json", exclude={"api_key", "header"}),
        interrupted=outcome.interrupted,
        runs=outcome.runs,
        not_measured=outcome.not_measured,
    )
    print_report(report, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    _write(report, settings)
    if outcome.interrupted:
        return _INTERRUPTED
    return 0 if report.runs and not report.not_measured and all(run.completed for run in report.runs) else 1


def _targets(settings: BenchSettings) -> list[Target]:
    if settings.config is None:
        targets = endpoint_targets(settings)
    else:
        targets = pool_targets(settings, load_pool(settings.config))
    if settings.baseline is not None and settings.baseline not in {target.name for target in targets}:
        raise unknown("--baseline", "target", settings.baseline, [target.name for target in targets])
    return targets


def _inputs(settings: BenchSettings) -> Inputs:
    trace = read_trace(settings.trace) if settings.trace is not None else None
    if settings.dataset is None:
        return Inputs(trace=trace)
    output_tokens = settings.output_tokens
    if output_tokens is not None and output_tokens[0] != output_tokens[1]:
        raise UsageError("--output-tokens: with --dataset, give one number instead of a range")
    count_tokens = token_counter(settings.tokenizer)
    limit = output_tokens[0] if output_tokens is not None else None
    return Inputs(read_dataset(settings.dataset, count_tokens, limit, chat=settings.endpoint == "chat"), trace)


def _measure(settings: BenchSettings, targets: Sequence[Target], inputs: Inputs) -> Outcome:
    run_dir = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
    runs = len(targets) * len(cells(settings, inputs.trace))
    watcher = TerminalWatcher(Console(stderr=True, highlight=False), runs, settings.duration_s)
    sweep = Sweep(settings, targets, inputs, run_dir, watcher)

    async def run() -> Outcome:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, sweep.stop)
        return await sweep.run()

    try:
        outcome = uvloop.run(run())
    finally:
        watcher.close()
    broken = any(failure.kind in {"connect", "broken"} for run in outcome.runs for failure in run.failures)
    if (broken or outcome.not_measured) and any(run_dir.rglob("*.log")):
        print(f"Logs of the replicas: {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
    return outcome


def _shown_command(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with possible secrets replaced by `...`."""
    shown: list[str] = []
    for word in argv[1:]:
        if shown and shown[-1] in _SECRET_OPTIONS:
            shown.append("...")
        elif word.startswith(tuple(f"{option}=" for option in _SECRET_OPTIONS)):
            shown.append(word.partition("=")[0] + "=...")
        else:
            shown.append(word)
    return ("gateway", *shown)


def _write(report: Report, settings: BenchSettings) -> None:
    if settings.json_file is not None:
        settings.json_file.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if settings.html_file is not None:
        settings.html_file.write_text(bench_page(report), encoding="utf-8")
