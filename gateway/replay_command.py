"""`gateway replay` from its options to its exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from backends.speculation import serve_config
from gateway.config import ConfigError, load_pool
from gateway.policy_option import PolicyOptionError, named_policies
from gateway.replay_page import page
from gateway.settings import ModelSettings
from policies.experience import Row
from policies.policy import Policy
from policies.prior import DEFAULT_CALIBRATION
from policies.replay import Replayed, ReplicaSpec, learned_rows, replay, set_learned, slo_kept
from policies.replay_request import ReplayRequest, replay_request
from policies.trace import BrokenLines, TraceError, TraceRecord, read_trace

_BAD_INPUT = 2
_CLAIRVOYANT = "clairvoyant"
_TOLD_EVERY = 200  # requests


class ReplayError(Exception):
    """Options that do not go together, or a trace that cannot be replayed."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What was asked for on the command line; see `gateway replay --help`."""

    trace: tuple[Path, ...]
    config: Path
    policies: tuple[str, ...] = ()
    model: str | None = None
    rate: float | None = None
    speed: float = 1.0
    limit: int | None = None
    warmup: int = 0
    seed: int = 0
    slo: str | None = None
    calibration: str | None = None
    state: Path | None = None
    trace_format: str | None = None
    strict: bool = False
    json_file: Path | None = None
    report: Path | None = None


def run_replay(options: ReplayOptions) -> int:
    """Replay a trace as the command line asks for it.

    Returns
    -------
    int
        Exit status: 0, or 2 if the input is wrong.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        slo = slo_of(options.slo)
        name, served = served_model(options.config, options.model)
        pool = pool_of(served, options.calibration)
        chosen = chosen_policies(options.policies, served, options.seed)
        records = read_trace(
            list(options.trace), format=options.trace_format, strict=options.strict, in_order=True, report=broken
        )
        requests = requests_of(islice(records, options.limit), options, served.default_temperature)
        kept = _load_state(options.state)
        played = _play(pool, requests, chosen | {_CLAIRVOYANT: None}, options, kept)
        _save_state(options.state, kept, chosen)
        document = _document(name, options, pool, slo, played, chosen)
        if options.json_file is not None:
            options.json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        if options.report is not None:
            options.report.write_text(page(document), encoding="utf-8")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _BAD_INPUT
    except (ReplayError, PolicyOptionError, TraceError, ValueError, OSError) as error:
        print(f"gateway replay: {error}", file=sys.stderr)
        return _BAD_INPUT
    _print(document)
    return 0


def _document(
    model: str,
    options: ReplayOptions,
    pool: Sequence[ReplicaSpec],
    slo: Mapping[str, float],
    played: Mapping[str, Replayed],
    chosen: Mapping[str, Policy | None],
) -> dict[str, Any]:
    """Return what `--json` writes."""
    best_s = mean_of(played[_CLAIRVOYANT].e2e_s)
    return {
        "trace": [path.name for path in options.trace],
        "model": model,
        "requests": len(played[_CLAIRVOYANT].e2e_s) + played[_CLAIRVOYANT].errors,
        "warmup": options.warmup,
        "seed": options.seed,
        "clairvoyant_mean_e2e_s": best_s,
        "policies": {title: figures_of(played[title], pool, slo, best_s) for title in chosen},
    }


def chosen_policies(given: Sequence[str], served: ModelSettings, seed: int) -> dict[str, Policy | None]:
    """Return the policies of `--policy` in their order, each under a name of its own; None is the clairvoyant one.

    Raises
    ------
    PolicyOptionError
        If one cannot be built.
    """
    named = [text for text in given if text != _CLAIRVOYANT]
    built = iter(named_policies(named, served, seed).items()) if named or not given else iter(())
    chosen: dict[str, Policy | None] = {}
    for text in given or ("",):
        if text == _CLAIRVOYANT:
            chosen[text] = None
        else:
            title, policy = next(built)
            chosen[title] = policy
    return chosen


def slo_of(text: str | None) -> dict[str, float]:
    """Return the bounds of `--slo ttft=0.5,tpot=0.02,e2e=10` in seconds; none without it.

    Raises
    ------
    ReplayError
        If it is written in another way.
    """
    bounds: dict[str, float] = {}
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        try:
            bounds[name.strip()] = float(value)
        except ValueError:
            raise ReplayError(f"--slo {text}: write it as ttft=0.5,tpot=0.02,e2e=10, in seconds") from None
    if unknown := bounds.keys() - {"ttft", "tpot", "e2e"}:
        raise ReplayError(f"--slo {text}: no bound is called {min(unknown)!r}; there are ttft, tpot, e2e")
    return bounds


def served_model(config: Path, model: str | None) -> tuple[str, ModelSettings]:
    """Return the model of a pool file that a trace is replayed for.

    Raises
    ------
    ReplayError
        If there are several and none is named, or the one named is not there.
    """
    models = load_pool(config).models
    if model is None and len(models) > 1:
        raise ReplayError(f"{config} has several models; name one with --model: {', '.join(models)}")
    name = model or next(iter(models))
    if name not in models:
        raise ReplayError(f"{config} has no model {name!r}; it has {', '.join(models)}")
    return name, models[name]


def pool_of(served: ModelSettings, calibration: str | None) -> list[ReplicaSpec]:
    """Return the replicas of a model as they are simulated; those that are not simulated need a calibration."""
    return [
        ReplicaSpec(
            name=name,
            method=one.method,
            config={
                key: value for key, value in serve_config(one.method, one.speculative_config).items() if key != "method"
            },
            calibration=calibration or (one.simulate.calibration if one.simulate else DEFAULT_CALIBRATION),
            weight=one.weight,
        )
        for name, one in served.backends.items()
    ]


def requests_of(
    records: Iterable[TraceRecord], options: ReplayOptions, default_temperature: float
) -> list[ReplayRequest]:
    """Return the requests of a trace, with their times.

    Raises
    ------
    ReplayError
        If the trace has no times and no rate is given, or it is empty.
    """
    kept = list(records)
    if not kept:
        raise ReplayError("the trace has no requests")
    if len(kept) <= options.warmup:
        raise ReplayError(f"the trace has {len(kept)} requests; --warmup {options.warmup} leaves none to count")
    first, last = kept[0].arrived_at, kept[-1].arrived_at
    rng = Random(options.seed)
    now_s = 0.0
    requests = []
    timed = first is not None and last is not None and (last > first or len(kept) == 1)
    if options.rate is None and not timed:
        raise ReplayError("the trace does not tell when requests came; give --rate")
    speed = options.speed
    if options.rate is not None and timed and last != first:
        assert first is not None
        assert last is not None
        speed = options.rate * (last - first) / len(kept)
    for record in kept:
        if timed:
            assert first is not None
            now_s = max(now_s, ((record.arrived_at or first) - first) / speed)
        else:
            assert options.rate is not None
            now_s += rng.expovariate(options.rate)
        requests.append(replay_request(record, now_s, default_temperature))
    return requests


def _play(
    pool: Sequence[ReplicaSpec],
    requests: Sequence[ReplayRequest],
    chosen: Mapping[str, Policy | None],
    options: ReplayOptions,
    kept: Mapping[str, list[Row]],
) -> dict[str, Replayed]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, left"),
        TimeRemainingColumn(),
    )
    played = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(chosen) * len(requests))
        done = 0

        def told() -> None:
            nonlocal done
            done += 1
            if done % _TOLD_EVERY == 0:
                bar.update(task, completed=done)

        for title, policy in chosen.items():
            bar.update(task, description=title)
            if policy is not None and title in kept:
                set_learned(policy, kept[title], requests[0].arrived_s)
            played[title] = replay(pool, requests, policy, seed=options.seed, warmup=options.warmup, progress=told)
        bar.update(task, completed=done)
    return played


def figures_of(
    result: Replayed, pool: Sequence[ReplicaSpec], slo: Mapping[str, float], best_s: float | None
) -> dict[str, Any]:
    """Return the figures of one policy; times in seconds.

    `goodput` is requests a second that kept all bounds of the SLO, and `slo_kept` their share; without one all do.
    """
    good = slo_kept(result, slo)
    duration_s, mean_s = result.duration_s, mean_of(result.e2e_s)
    shares = np.bincount(result.backend, minlength=len(pool)) / max(1, len(result.backend))
    return {
        "requests": len(result.e2e_s),
        "errors": result.errors,
        "e2e_s": _summary(result.e2e_s),
        "ttft_s": _summary(result.ttft_s),
        "tpot_s": _summary(result.tpot_s[~np.isnan(result.tpot_s)]),
        "output_tokens_per_s": float(result.output_tokens.sum() / duration_s) if duration_s else 0.0,
        "shares": {one.name: float(share) for one, share in zip(pool, shares, strict=True)},
        "goodput": float(good.sum() / duration_s) if duration_s else 0.0,
        "slo_kept": float(good.mean()) if len(good) else None,
        "regret": mean_s / best_s - 1.0 if mean_s is not None and best_s is not None else None,
    }


def mean_of(values: npt.NDArray[np.float64]) -> float | None:
    """Return the mean; None of nothing."""
    return float(values.mean()) if len(values) else None


def _summary(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _print(document: Mapping[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    title = f"{document['requests']:,} requests on simulated replicas, times in seconds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("policy")
    for heading in ("errors", "e2e mean", "p50", "p90", "p99", "ttft mean", "p99", "tpot ms", "tokens/s", "regret"):
        table.add_column(heading, justify="right")
    table.add_column("share of each backend")
    for name, one in document["policies"].items():
        e2e, ttft, tpot = one["e2e_s"], one["ttft_s"], one["tpot_s"]["mean"]
        table.add_row(
            name,
            f"{one['errors']}",
            *(_seconds(e2e[which]) for which in ("mean", "p50", "p90", "p99")),
            _seconds(ttft["mean"]),
            _seconds(ttft["p99"]),
            "-" if tpot is None else f"{1e3 * tpot:.2f}",
            f"{one['output_tokens_per_s']:,.0f}",
            "-" if one["regret"] is None else f"{one['regret']:+.1%}",
            "  ".join(f"{backend} {share:.0%}" for backend, share in one["shares"].items()),
        )
    console.print(table)
    console.print("regret: mean time to finish over that of a choice which knows lengths and acceptance, less one")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _load_state(path: Path | None) -> dict[str, list[Row]]:
    if path is None or not path.exists():
        return {}
    try:
        document = orjson.loads(path.read_bytes())
        return {
            policy: [Row(table, 0, tuple(key), tuple(sums)) for table, key, sums in rows]
            for policy, rows in document["learned"].items()
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise ReplayError(f"--state {path}: this is no file that `gateway replay --state` has written") from None


def _save_state(path: Path | None, kept: dict[str, list[Row]], chosen: Mapping[str, Policy | None]) -> None:
    if path is None:
        return
    for name, policy in chosen.items():
        if policy is not None and policy.experience is not None:
            kept[name] = learned_rows(policy)
    rows = {name: [(row.table, row.key, row.sums) for row in of_policy] for name, of_policy in kept.items()}
    path.write_bytes(orjson.dumps({"learned": rows}))
