"""`gateway evaluate` from its options to its exit status."""

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

from backends.speculation import num_speculative_tokens
from backends.validation import UsageError, did_you_mean
from gateway.config.load import load_pool
from gateway.config.settings import ModelSettings
from lab.evaluate.bootstrap import Interval
from lab.evaluate.estimators import Estimate, Evaluation, MetricEvaluation, evaluate
from lab.evaluate.log import LoggedCandidate, read_log
from lab.options.policy import named_policies
from lab.replay.learned_file import read_learned
from lab.replay.simulate import set_learned
from lab.trace import BrokenLines, TraceRecord, read_trace
from policies.policy import Policy

_CANNOT_TELL = 1
_ESTIMATORS = ("ips", "snips", "dr")
_TOLD_EVERY = 1000  # records
_SHOWN = 0.005


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
    state: Path | None = None,
) -> int:
    """Evaluate policies on a log as the command line asks for it.

    Returns
    -------
    int
        Exit status: 0, 1 if the log can tell of none of the policies, 2 if the input is wrong.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        records = read_trace(trace, format=trace_format, strict=strict, report=broken)
        first, records = _peek(records)
        served = _served(config, model or first.model)
        policies = named_policies(policy, served, seed)
        if state is not None:
            _give_learned(policies, state, first.arrived_at or 0.0)
        wanted = _names(served, model or first.model, config)
        mine = (record for record in records if record.model in wanted)
        log = read_log(_counted(islice(mine, limit)), policies, _pool(served))
        evaluations = evaluate(log, seed=seed)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    left_out = dict(log.left_out) | ({"broken lines": broken.count} if broken.count else {})
    _print(console, evaluations, log.requests, left_out)
    if json_file is not None:
        document = {"requests": log.requests, "left_out": left_out, "policies": dict(map(_document, evaluations))}
        json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return _CANNOT_TELL if all(found.refusal for found in evaluations) else 0


def _give_learned(policies: Mapping[str, Policy], state: Path, now_s: float) -> None:
    """Let policies begin with what a replay has kept of each, by its name."""
    learned = read_learned(state)
    learning = {name: policy for name, policy in policies.items() if policy.statistics is not None}
    if not learning:
        raise UsageError(f"--state {state}: none of the policies learns")
    for name, policy in learning.items():
        if name not in learned:
            raise UsageError(f"--state {state}: nothing in it was learned by {name}; {did_you_mean(name, learned)}")
        set_learned(policy, learned[name], now_s)
        if (fit := policy.maintenance()) is not None:
            fit()


def _peek(records: Iterator[TraceRecord]) -> tuple[TraceRecord, Iterator[TraceRecord]]:
    for first in records:
        return first, chain([first], records)
    raise UsageError("the trace holds no request")


def _served(config: Path | None, model: str) -> ModelSettings | None:
    """Return the pool's settings of a model, by its name or an alias; those of its only model where it has one."""
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
    """Return the names under which requests of one model are logged."""
    if served is None or config is None:
        return frozenset({model})
    name = next(name for name, settings in load_pool(config).models.items() if settings == served)
    return frozenset({model, name, *served.aliases})


def _pool(served: ModelSettings | None) -> dict[str, LoggedCandidate]:
    if served is None:
        return {}
    return {
        name: LoggedCandidate(
            name, one.method, num_speculative_tokens(one.method, one.speculative_config), weight=one.weight
        )
        for name, one in served.backends.items()
    }


def _counted(records: Iterable[TraceRecord]) -> Iterator[TraceRecord]:
    """Yield records, and tell a person who watches how many there have been."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} requests read"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None)
        for number, record in enumerate(records, 1):
            if number % _TOLD_EVERY == 0:
                progress.update(task, completed=number)
            yield record


def _print(console: Console, evaluations: Sequence[Evaluation], requests: int, left_out: dict[str, int]) -> None:
    told = f"{requests:,} requests"
    if left_out:
        told += " (left out: " + "; ".join(f"{count:,} {why}" for why, count in left_out.items()) + ")"
    console.print(told)
    for found in evaluations:
        told = f"as much as {found.effective_sample_size:,.0f} requests of its own"
        console.print(f"\n{found.policy}: {told}; would send {_shares(found)}", markup=False)
        if found.refusal:
            console.print(f"  The log cannot tell: {found.refusal}.", markup=False)
        elif found.metrics:
            console.print(_table(found.metrics))
        for note in found.notes:
            console.print(f"  Note: {note}.", markup=False)
    console.print()
    console.print(
        "Means and 95% intervals for traffic like the logged one, each request by itself: how requests slow each other "
        "under another policy is not in them."
    )


def _shares(found: Evaluation) -> str:
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{share:.0%} to {name} (log {found.logged_shares[name]:.0%})" for name, share in shares if share >= _SHOWN
    )


def _table(metrics: Mapping[str, MetricEvaluation]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "logged", "IPS", "SNIPS", "DR", "to the log (DR, else SNIPS)"):
        table.add_column(heading, no_wrap=True, justify="left" if not heading else "right")
    for metric, seen in metrics.items():
        row = [f"{metric} mean", f"{seen.logged:.4g}"]
        row += [_mean(seen.estimates.get(name)) for name in _ESTIMATORS]
        best = seen.estimates.get("dr", seen.estimates["snips"]).to_log
        row.append(f"{best.value - 1:+.1%} ({best.low - 1:+.1%} to {best.high - 1:+.1%})")
        table.add_row(*row)
        for probability, quantile in seen.quantiles.items():
            table.add_row(f"{metric} p{100 * probability:g}", "", "", _interval(quantile), "", "")
    return table


def _mean(estimate: Estimate | None) -> str:
    return "" if estimate is None else _interval(estimate.mean)


def _interval(seen: Interval) -> str:
    return f"{seen.value:.4g} ({seen.low:.4g} to {seen.high:.4g})"


def _document(found: Evaluation) -> tuple[str, dict[str, Any]]:
    document: dict[str, Any] = {
        "requests": found.requests,
        "effective_sample_size": found.effective_sample_size,
        "mean_weight": found.mean_weight,
        "largest_weight": found.largest_weight,
        "impossible": found.impossible,
        "shares": dict(found.shares),
        "logged_shares": dict(found.logged_shares),
        "refused": found.refusal or None,
        "notes": found.notes,
    }
    for metric, seen in found.metrics.items():
        document[metric] = {
            "logged": {"mean": seen.logged},
            **{name: {"mean": one.mean, "to_log": one.to_log} for name, one in seen.estimates.items()},
            "quantiles": {f"p{100 * probability:g}": one for probability, one in seen.quantiles.items()},
        }
    return found.policy, document
