"""Implementation of `gateway replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backends.validation import UsageError
from gateway.config.load import load_pool
from gateway.config.settings import ModelSettings
from gateway.service.default_temperature import assumed_temperature
from lab.options.shared import TraceOptions, slo_bounds
from lab.past.check import past_of
from lab.past.pool import simulated_pool
from lab.replay.comparison import verdict
from lab.replay.figures import figures_of, figures_tables
from lab.replay.options import ReplayOptions
from lab.replay.pace import arrivals
from lab.replay.page import ReplayPage
from lab.replay.play import ORACLE, PolicyRunner, chosen_policies, compare, play_all
from lab.report.terminal import report, write_json
from lab.simulation.table import RequestTable, request_table


def run_replay(options: ReplayOptions) -> int:
    """Replay a trace, given the command line's options."""
    try:
        if options.config is None:
            raise UsageError("--config: give a pool to simulate, or --live URL")
        if len(options.rate) > 1:
            raise UsageError("--rate: several need --live")
        slo, seed = slo_bounds(options.slo), options.seed or 0
        name, served = served_model(options.config, options.model)
        policies = chosen_policies(options.policies, served, seed)
        rate = options.rate[0] if options.rate else None
        with requests_of(options, served, seed, rate, options.speed, warmup=options.warmup) as requests:
            past = past_of(simulated_pool(served, requests, options.calibration), requests, seed)
            runner = PolicyRunner(past.pool.replicas, requests, options.policies, served, seed, options.warmup)
            played = play_all(runner, policies)
            traits, assumed = requests.traits, requests.assumed
            compared = compare(runner, played, options.replications)
            is_long = options.replications is None and compared and not requests.is_one
            if is_long and not next(iter(compared.values())).is_known:
                assumed.append("Intervals for so many requests take a while: --replications 6 makes them.")
        deciders = {title: one for title, one in played.items() if title != ORACLE}
        if unhelped := min(one.errors for one in played.values()):
            assumed.append(
                f"{unhelped:,} requests are in no figure: with prompt and answer they are longer than the replicas' "
                "context or KV cache, or they need a baseline."
            )
        backends = [replica.name for replica in past.pool.replicas]
        first = next(iter(played.values()))
        document: dict[str, Any] = {
            "trace": [path.name for path in options.trace],
            "model": name,
            "requests": len(first.e2e_s) + first.errors,
            "warmup": options.warmup,
            "seed": seed,
            "slo": slo,
            "assumed": assumed,
            "verdict": past.beside(verdict(deciders, compared, unhelped)),
            "past": past.document(),
            "policies": {title: figures_of(one, backends, slo) for title, one in played.items()},
        }
        write_json(options.json_file, document)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    found = [document["verdict"], f"{document['requests']:,} requests on simulated replicas", *assumed, ""]
    found += figures_tables(document["policies"], slo, "policy")
    title = f"gateway replay of {', '.join(document['trace'])}"
    report(title, found, options.report, ReplayPage(played, traits, compared, "policy").drawn, past.parts())
    return 0


def served_model(config: Path, model: str | None) -> tuple[str, ModelSettings]:
    """Return name and settings of the pool file's model to replay for."""
    models = load_pool(config).models
    if model is None and len(models) > 1:
        raise UsageError(f"{config} has several models; name one with --model: {', '.join(models)}")
    name = model or next(iter(models))
    if name not in models:
        raise UsageError(f"{config} has no model {name!r}; it has {', '.join(models)}")
    return name, models[name]


@contextmanager
def requests_of(
    options: TraceOptions, served: ModelSettings, seed: int, rate: float | None, speed: float, *, warmup: int = 0
) -> Iterator[RequestTable]:
    """Yield the requests of a trace with their arrival times."""
    records = options.records()
    with request_table(records, assumed_temperature(served)) as table:
        requests = table[: options.limit]
        if requests and len(requests) <= warmup:
            raise UsageError(f"the trace has {len(requests)} requests; --warmup {warmup} leaves none to count")
        if not requests.order.is_open:
            yield requests.in_sessions(rate, speed, 1, seed)
        else:
            yield requests.paced(arrivals(requests.arrived_at, rate, speed, seed))
