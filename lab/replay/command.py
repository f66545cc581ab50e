"""`gateway replay` from its options to its exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from backends.speculation import serve_config
from backends.validation import UsageError
from gateway.config.load import load_pool
from gateway.config.settings import ModelSettings, SimulateSettings
from lab.options.slo import slo_bounds
from lab.replay.figures import figures_console, figures_of, figures_tables, mean_of
from lab.replay.learned_file import read_learned, write_learned
from lab.replay.pace import arrivals
from lab.replay.page import page
from lab.replay.play import ORACLE, Game, chosen_policies, play_all
from lab.replay.simulate import Replayed, ReplicaSpec
from lab.replay.table import RequestTable, tabulated
from lab.trace import BrokenLines, read_trace
from policies.learned.models.prior import DEFAULT_CALIBRATION
from policies.policy import Policy


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
    try:
        slo = slo_bounds(options.slo)
        name, served = served_model(options.config, options.model)
        pool = pool_of(served, options.calibration)
        chosen = chosen_policies(options.policies, served, options.seed)
        kept = read_learned(options.state) if options.state is not None and options.state.exists() else {}
        with requests_of(options, served) as requests:
            game = Game(tuple(pool), requests, options.policies, served, kept, options.seed, options.warmup)
            played, learned = play_all(game, chosen | {ORACLE: None})
        if options.state is not None:
            write_learned(options.state, kept | learned)
        document = _document(name, options, pool, slo, played, chosen)
        if options.json_file is not None:
            options.json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        if options.report is not None:
            options.report.write_text(page(document), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    console = figures_console()
    console.print(f"{document['requests']:,} requests on simulated replicas", end="\n\n")
    for table in figures_tables(document["policies"], slo, "policy"):
        console.print(table, "")
    console.print("regret: mean time to finish over that of a choice which knows lengths and acceptance, less one")
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
    best_s = mean_of(played[ORACLE].e2e_s)
    return {
        "trace": [path.name for path in options.trace],
        "model": model,
        "requests": len(played[ORACLE].e2e_s) + played[ORACLE].errors,
        "warmup": options.warmup,
        "seed": options.seed,
        "slo": slo,
        "clairvoyant_mean_e2e_s": best_s,
        "policies": {title: figures_of(played[title], [one.name for one in pool], slo, best_s) for title in chosen},
    }


def served_model(config: Path, model: str | None) -> tuple[str, ModelSettings]:
    """Return the model of a pool file that a trace is replayed for.

    Raises
    ------
    UsageError
        If there are several and none is named, or the one named is not there.
    """
    models = load_pool(config).models
    if model is None and len(models) > 1:
        raise UsageError(f"{config} has several models; name one with --model: {', '.join(models)}")
    name = model or next(iter(models))
    if name not in models:
        raise UsageError(f"{config} has no model {name!r}; it has {', '.join(models)}")
    return name, models[name]


def _given_context(simulate: SimulateSettings | None) -> int | None:
    """Return the longest context that the pool file sets; else it is the calibration's."""
    return simulate.max_model_len if simulate is not None and "max_model_len" in simulate.model_fields_set else None


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
            max_model_len=_given_context(one.simulate),
        )
        for name, one in served.backends.items()
    ]


@contextmanager
def requests_of(options: ReplayOptions, served: ModelSettings) -> Iterator[RequestTable]:
    """Give the requests of a trace, with their times, while the block lasts; broken lines are told on standard error.

    Raises
    ------
    UsageError
        If the trace has no times and no rate is given, or it is empty.
    UsageError
        If the warm-up takes them all.
    TraceError
        If it cannot be read.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    records = read_trace(list(options.trace), format=options.trace_format, strict=options.strict, report=broken)
    with tabulated(records, served.default_temperature) as table:
        requests = table[: options.limit]
        if requests and len(requests) <= options.warmup:
            raise UsageError(f"the trace has {len(requests)} requests; --warmup {options.warmup} leaves none to count")
        yield requests.paced(arrivals(requests.arrived_at, options.rate, options.speed, options.seed))
