"""Implementation of `gateway tune --schedule`: how many tokens a replica should draft, by its load.

It plays the requests of a trace on one replica without speculation, with the current k, with the best k by batch size,
and with adaptive verification. The latter profiles its steps with a context of 8,192 tokens by default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import yaml

from backends.calibration.batch_schedule import SCHEDULED, with_ranges
from backends.calibration.load import load_calibration
from backends.calibration.parameters import PROFILE_CONTEXT, PROFILE_CONTEXT_KEY
from backends.speculation import SCHEDULE_KEY, Method
from backends.validation import UsageError
from lab.parallel import all_cores
from lab.past.check import past_of
from lab.past.pool import simulated_pool
from lab.replay.command import requests_of, served_model
from lab.report.terminal import report, text_table, write_file, write_json
from lab.simulation.drafts import best_schedule, mean_context_tokens, tokens_per_step
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from lab.tune.options import TuneOptions
from policies.build import build
from policies.load_policy import LoadSettings

LOADS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Requests per second, relative to a replica's share of the trace's."""
_ADAPTIVE: Final = "enable_adaptive_verification"
_MOST_REQUESTS: Final = 2000
_NONE, _FIXED = "no speculation", "k as it is"


class Played(NamedTuple):
    """One way of drafting at one load."""

    mean_s: float  # from arrival to the last token
    in_flight: float  # mean number of requests


def ways(spec: ReplicaSpec, requests: Sequence[ReplayRequest]) -> dict[str, ReplicaSpec]:
    """Return the possible ways of drafting of a replica, by name."""
    calibration, context = load_calibration(spec.calibration), mean_context_tokens(requests)
    config = {key: value for key, value in spec.config.items() if key not in {SCHEDULE_KEY, _ADAPTIVE}}
    per_step = tokens_per_step(calibration, spec.method, config, requests)
    ranges = best_schedule(calibration, spec.method, config, per_step, context, calibration.scheduler.max_num_seqs)
    adaptive = replace(spec, config={**config, _ADAPTIVE: True}, profile_context=None)
    found = {
        _NONE: replace(spec, method=Method.BASELINE, config={}),
        _FIXED: spec,
        f"adaptive, profiled with {PROFILE_CONTEXT:,}": adaptive,
        f"adaptive, profiled with {round(context):,}": replace(adaptive, profile_context=round(context)),
    }
    if ranges:
        name = "k by batch size" if len(ranges) > 1 else f"k {ranges[0][2]} at every batch size"
        found[name] = replace(spec, config=with_ranges(config, ranges))
    return found


def play(requests: Sequence[ReplayRequest], seed: int, task: tuple[ReplicaSpec, float]) -> Played:
    """Play requests on one replica, arriving faster by the task's factor."""
    spec, faster = task
    coming = [replace(each, arrived_s=each.arrived_s / faster) for each in requests]
    played = replay([spec], coming, build("least_loaded", LoadSettings()), seed=seed)
    if not len(played.e2e_s):
        return Played(math.inf, math.inf)
    return Played(float(played.e2e_s.mean()), float(played.e2e_s.sum() / max(played.duration_s, 1e-9)))


def run_schedule(options: TuneOptions) -> int:
    """Compare the ways, print the result, and write the settings."""
    try:
        model, served = served_model(options.config, options.model)
        with requests_of(options, served, options.seed, options.rate, options.speed) as table:
            past = past_of(simulated_pool(served, table, options.calibration), table, options.seed)
            replicas = past.pool.replicas
            requests = list(table[:_MOST_REQUESTS])
            some = f"The first {len(requests):,} of {len(table):,} requests, each way once: "
            some += " ".join(["what differs little may be chance.", *table.assumed])
            heads = {(one.method, str(sorted(one.config.items()))): one for one in replicas if one.method in SCHEDULED}
            if not heads:
                raise UsageError(f"model {model!r} has no replica that drafts with a model: k matters to those alone")
            parts, written, figures = _compared(heads.values(), requests, options.seed, len(replicas))
        parts[0] = past.beside(str(parts[0]))
        said = [*(each for each in parts if isinstance(each, str) and each), some, str(past.pool)]
        head = "".join(f"# {line}\n" for line in ("Made by `gateway tune --schedule` on a simulated replica.", *said))
        text = yaml.safe_dump({"backends": written}, sort_keys=False, default_flow_style=None, width=10_000)
        write_file(options.out, (head + text).encode())
        write_json(options.json_file, {"model": model, "replicas": figures, "assumed": some, "past": past.document()})
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    report("gateway tune --schedule", [*parts, some], before=past.parts())
    return 0


def _compared(
    heads: Iterable[ReplicaSpec], requests: Sequence[ReplayRequest], seed: int, replicas: int
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Compare the ways of each head; return what to print, and by replica the settings to write and the figures."""
    parts: list[Any] = []
    written: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    with all_cores(partial(play, requests, seed), None, "simulating") as play_all:
        for spec in heads:
            found = ways(spec, requests)
            tasks = [(way, load / replicas) for way, load in product(found.values(), LOADS)]
            played = dict(zip(product(found, LOADS), play_all(tasks), strict=True))
            best = {load: min(found, key=lambda name, load=load: played[name, load].mean_s) for load in LOADS}  # type: ignore[misc]
            parts += [_verdict(spec, found, played, best), "", _table(found, played, best), ""]
            written[spec.name] = settings_of(found[_chosen(found, played)])
            figures[spec.name] = {f"{name} at {load:g}": one._asdict() for (name, load), one in played.items()}
    return parts, written, figures


def settings_of(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the keys of a backend in the pool file that set a way of drafting."""
    if spec.method is Method.BASELINE:
        return {"method": str(Method.BASELINE)}
    document: dict[str, Any] = {"method": str(spec.method), "speculative_config": dict(spec.config)}
    if spec.profile_context is not None:
        document["serve"] = {"env": {PROFILE_CONTEXT_KEY: str(spec.profile_context)}}
    return document


def _chosen(found: Mapping[str, ReplicaSpec], played: Mapping[tuple[str, float], Played]) -> str:
    """Return the way with the least time over all loads, relative to each load's best."""

    def lost(name: str) -> float:
        return sum(
            math.log(played[name, load].mean_s / min(played[one, load].mean_s for one in found)) for load in LOADS
        )

    return min(found, key=lost)


def _verdict(
    spec: ReplicaSpec,
    found: Mapping[str, ReplicaSpec],
    played: Mapping[tuple[str, float], Played],
    best: Mapping[float, str],
) -> str:
    name = _chosen(found, played)
    over = [played[name, load].mean_s / played[_FIXED, load].mean_s - 1 for load in LOADS]
    by_load = "; ".join(
        f"{each} at {', '.join(f'{load:g}' for load in LOADS if best[load] == each)}"
        for each in dict.fromkeys(best.values())
    )
    kept = "Keep" if name == _FIXED else "Set"
    return (
        f"{spec.name} ({spec.method}): {kept} {name}, {min(over):+.1%} to {max(over):+.1%} of the time with {_FIXED}. "
        f"Best by load, in times of the trace's: {by_load}."
    )


def _table(
    found: Mapping[str, ReplicaSpec], played: Mapping[tuple[str, float], Played], best: Mapping[float, str]
) -> Any:
    table = text_table(["mean time, s (requests in flight)", *(f"x {load:g}" for load in LOADS)], left=1)
    for name in found:
        cells = [played[name, load] for load in LOADS]
        marks = ["*" if best[load] == name else "" for load in LOADS]
        table.add_row(
            name, *(f"{one.mean_s:.2f} ({one.in_flight:.1f}){mark}" for one, mark in zip(cells, marks, strict=True))
        )
    return table
