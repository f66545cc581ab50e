"""Implementation of `gateway evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.draft_schedule import draft_schedule
from backends.speculation import serve_config
from backends.validation import UsageError, did_you_mean
from gateway.config.load import load_pool
from gateway.config.settings import ModelSettings
from lab.evaluate.estimators import Estimate, Evaluation, MetricEvaluation, evaluate
from lab.evaluate.log import LoggedCandidate, read_log
from lab.evaluate.page import evaluation_page
from lab.options.policy import named_policies
from lab.replay.learned_file import read_learned
from lab.replay.simulate import set_learned
from lab.statistics import Interval
from lab.trace import BrokenLines, TraceRecord, read_trace
from policies.policy import Policy
from policies.roles import Maintained, Stateful

_ALL_REFUSED = 1
_ESTIMATORS = ("ips", "snips", "dr")
_PROGRESS_EVERY = 1000  # records
_MIN_SHOWN_SHARE = 0.005


def run_evaluate(
    *,
    trace: Sequence[Path],
    policy: Sequence[str],
    config: Path | None,
    model: str | None,
    trace_format: str | None,
    strict: bool,
    limit: int | None,
    seed: int,
    json_file: Path | None,
    report: Path | None = None,
    state: Path | None = None,
) -> int:
    """Evaluate policies on a log with the options of the command line.

    Returns
    -------
    int
        Exit status: 0 for success, 1 if no policy can be evaluated on this log, 2 if the input is wrong.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        records = read_trace(trace, format=trace_format, strict=strict, report=broken)
        first, records = _peek(records)
        served = _served(config, model or first.model)
        policies = named_policies(policy, served, seed)
        if state is not None:
            _load_learned(policies, state, first.arrived_at or 0.0)
        names = _names(served, model or first.model, config)
        of_model = (record for record in records if record.model in names)
        log = read_log(_with_progress(islice(of_model, limit)), policies, _pool(served))
        evaluations = evaluate(log, seed=seed)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    left_out = dict(log.left_out) | ({"broken lines": broken.count} if broken.count else {})
    _print(console, evaluations, log.requests, left_out)
    if json_file is not None:
        document = {"requests": log.requests, "left_out": left_out, "policies": dict(map(_document, evaluations))}
        json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if report is not None:
        files = [path.name for path in trace]
        methods = {name: one.method.value for name, one in _pool(served).items()}
        report.write_text(evaluation_page(evaluations, log, files, left_out, methods), encoding="utf-8")
    return _ALL_REFUSED if all(evaluation.refusal for evaluation in evaluations) else 0


def _load_learned(policies: Mapping[str, Policy], state: Path, now_s: float) -> None:
    """Load into each policy what a replay has stored for its name."""
    learned = read_learned(state)
    learning = {name: policy for name, policy in policies.items() if isinstance(policy, Stateful)}
    if not learning:
        raise UsageError(f"--state {state}: none of the policies learns")
    for name, policy in learning.items():
        if name not in learned:
            raise UsageError(f"--state {state}: has nothing learned by {name}; {did_you_mean(name, learned)}")
        set_learned(policy, learned[name], now_s)
        if isinstance(policy, Maintained) and (fit := policy.maintenance()) is not None:
            fit()


def _peek(records: Iterator[TraceRecord]) -> tuple[TraceRecord, Iterator[TraceRecord]]:
    for first in records:
        return first, chain([first], records)
    raise UsageError("the trace has no requests")


def _served(config: Path | None, model: str) -> ModelSettings | None:
    """Return the pool's settings of a model by name or alias; if the pool has only one model, those of that model."""
    if config is None:
        return None
    models = load_pool(config).models
    for name, settings in models.items():
        if model in (name, *settings.aliases):
            return settings
    if len(models) == 1:
        return next(iter(models.values()))
    raise UsageError(f"--config {config} has no model {model!r}: {did_you_mean(model, models)}")


def _names(served: ModelSettings | None, model: str, config: Path | None) -> frozenset[str]:
    """Return the names under which requests of a model are logged."""
    if served is None or config is None:
        return frozenset({model})
    name = next(name for name, settings in load_pool(config).models.items() if settings == served)
    return frozenset({model, name, *served.aliases})


def _pool(served: ModelSettings | None) -> dict[str, LoggedCandidate]:
    if served is None:
        return {}
    return {
        name: LoggedCandidate(
            name,
            backend.method,
            draft_schedule(backend.method, serve_config(backend.method, backend.speculative_config)),
            weight=backend.weight,
        )
        for name, backend in served.backends.items()
    }


def _with_progress(records: Iterable[TraceRecord]) -> Iterator[TraceRecord]:
    """Yield the records, and show their number on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} requests read"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None)
        for number, record in enumerate(records, 1):
            if number % _PROGRESS_EVERY == 0:
                progress.update(task, completed=number)
            yield record


def _print(console: Console, evaluations: Sequence[Evaluation], requests: int, left_out: dict[str, int]) -> None:
    summary = f"{requests:,} requests"
    if left_out:
        summary += " (left out: " + "; ".join(f"{count:,} {why}" for why, count in left_out.items()) + ")"
    console.print(summary)
    for evaluation in evaluations:
        size = f"effective sample size {evaluation.effective_sample_size:,.0f}"
        console.print(f"\n{evaluation.policy}: {size}; would send {_shares(evaluation)}", markup=False)
        if evaluation.refusal:
            console.print(f"  Cannot be evaluated on this log: {evaluation.refusal}.", markup=False)
        elif evaluation.metrics:
            console.print(_table(evaluation.metrics))
        for note in evaluation.notes:
            console.print(f"  Note: {note}.", markup=False)
    console.print()
    console.print(
        "Means and 95% intervals for traffic like the logged one. Each request is considered by itself: that requests "
        "slow each other differently under another policy is not included."
    )


def _shares(evaluation: Evaluation) -> str:
    shares = sorted(evaluation.shares.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{share:.0%} to {name} (log {evaluation.logged_shares[name]:.0%})"
        for name, share in shares
        if share >= _MIN_SHOWN_SHARE
    )


def _table(metrics: Mapping[str, MetricEvaluation]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "logged", "IPS", "SNIPS", "DR", "vs. log (DR, else SNIPS)"):
        table.add_column(heading, no_wrap=True, justify="left" if not heading else "right")
    for metric, evaluation in metrics.items():
        row = [f"{metric} mean", f"{evaluation.logged:.4g}"]
        row += [_mean(evaluation.estimates.get(name)) for name in _ESTIMATORS]
        best = evaluation.estimates.get("dr", evaluation.estimates["snips"]).to_log
        row.append(f"{best.value - 1:+.1%} ({best.low - 1:+.1%} to {best.high - 1:+.1%})")
        table.add_row(*row)
        for probability, quantile in evaluation.quantiles.items():
            table.add_row(f"{metric} p{100 * probability:g}", "", "", _interval(quantile), "", "")
    return table


def _mean(estimate: Estimate | None) -> str:
    return "" if estimate is None else _interval(estimate.mean)


def _interval(interval: Interval) -> str:
    return f"{interval.value:.4g} ({interval.low:.4g} to {interval.high:.4g})"


def _document(evaluation: Evaluation) -> tuple[str, dict[str, Any]]:
    document: dict[str, Any] = {
        "requests": evaluation.requests,
        "effective_sample_size": evaluation.effective_sample_size,
        "mean_weight": evaluation.mean_weight,
        "largest_weight": evaluation.largest_weight,
        "impossible": evaluation.impossible,
        "shares": dict(evaluation.shares),
        "logged_shares": dict(evaluation.logged_shares),
        "refused": evaluation.refusal or None,
        "notes": evaluation.notes,
    }
    for metric, by_metric in evaluation.metrics.items():
        estimates = by_metric.estimates.items()
        document[metric] = {
            "logged": {"mean": by_metric.logged},
            **{name: {"mean": estimate.mean, "to_log": estimate.to_log} for name, estimate in estimates},
            "quantiles": {f"p{100 * share:g}": quantile for share, quantile in by_metric.quantiles.items()},
        }
    return evaluation.policy, document
