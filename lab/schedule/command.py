"""Implementation of `gateway tune --schedule`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from backends.calibration.batch_schedule import SCHEDULE_KEY, TOLERANCE
from backends.calibration.calibration import load_calibration
from backends.speculation import SpeculativeConfig
from backends.validation import UsageError
from gateway.advice.finding import LEAST_GAIN, flag_value
from gateway.cli.policy import Admin
from gateway.config.settings import ModelSettings
from lab.options.policy import policy_reference
from lab.parallel import all_cores
from lab.replay.command import pool_of, requests_of, served_model
from lab.replay.simulate import ReplicaSpec
from lab.replay.table import RequestTable
from lab.schedule.drafts import Drafts
from lab.schedule.edit import with_speculation
from lab.schedule.gains import LoadGain, Runner, capacity, gains
from lab.schedule.replicas import Measured, ScheduledReplica, from_requests, schedule_replica
from lab.statistics import REPLICATIONS
from lab.tune.options import TuneOptions

_MOST_REQUESTS = 4000
"""Requests that are simulated at each load and with each seed."""
_MIN_PARALLEL_REQUESTS = 1000  # fewer are simulated before other processes would have started
_WORTH = "The new values save time at {} of the capacity."
_NOTHING = "They are worth nothing at {}: less than 1%, or it may be chance."
_WORSE = "They lose at {}."
_SHOWN = (1, 8, 32, 128)
"""Batch sizes at which the gain in tokens per second is shown."""


def run_schedule(options: TuneOptions) -> int:
    """Find schedules with the options of the command line."""
    at_loads: list[LoadGain] = []
    try:
        model, served = served_model(options.config, options.model)
        pool = pool_of(served, options.calibration)
        if options.live:
            running = Admin(options.url, options.admin_key, None).get("/admin/pool")
            replicas = _schedules(pool, served, _from_gateway(running, model))
        else:
            with requests_of(replace(options, rate=1.0, speed=1.0), served, options.seed) as requests:
                cut = round(options.part * len(requests))
                if not 0 < cut < len(requests):
                    raise UsageError(f"the trace has {len(requests)} requests: too few to choose on one part of it")
                replicas = _schedules(pool, served, from_requests(requests[:cut]))
                at_loads = _gains(options, served, replicas, requests[cut : cut + _MOST_REQUESTS])
        changes = {one.spec.name: one.values for one in replicas if one.values is not None}
        text = with_speculation(options.config.read_text(encoding="utf-8"), model, changes)
        options.out.write_text(text, encoding="utf-8")
        if options.json_file is not None:
            options.json_file.write_bytes(orjson.dumps(_document(replicas, at_loads), option=orjson.OPT_INDENT_2))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    _print(replicas, at_loads)
    return 0


def _schedules(
    pool: Sequence[ReplicaSpec], served: ModelSettings, measure: Callable[[ReplicaSpec], Measured]
) -> list[ScheduledReplica]:
    replicas: list[ScheduledReplica] = []
    for spec in pool:
        serve = served.backends[spec.name].serve
        sequences = flag_value(serve.flags, "--max-num-seqs") if serve is not None else None
        one = schedule_replica(spec, measure, int(sequences) if sequences else None, TOLERANCE)
        if one.values is not None:
            SpeculativeConfig.model_validate(one.scheduled.config)
        replicas.append(one)
    if all(one.measured is None for one in replicas):
        reasons = "; ".join(f"{one.spec.name} ({one.spec.method}): {one.reason}" for one in replicas)
        raise UsageError(f"no replica of this pool gains by a schedule. {reasons}")
    return replicas


def _from_gateway(described: Any, model: str) -> Callable[[ReplicaSpec], Measured]:
    """Return a function that takes a replica's acceptance from `/admin/pool` of a running gateway."""
    models = described["models"]
    if model not in models:
        raise UsageError(f"the running gateway has no model {model!r}; it has {', '.join(models)}")

    def measure(spec: ReplicaSpec) -> Measured:
        backend = models[model]["backends"].get(spec.name)
        engine = None if backend is None else backend["engine"]
        if engine is None:
            raise UsageError(f"{spec.name}: the running gateway has no metrics of it")
        if SCHEDULE_KEY in spec.config:
            raise UsageError(f"{spec.name}: its counters mix several k, since it has a schedule already; give a trace")
        if not engine["drafts"] or not engine["accepted_per_position"]:
            raise UsageError(f"{spec.name}: it has not drafted yet; ask again when it has served some traffic")
        if not engine["running"]:
            raise UsageError(f"{spec.name}: it is idle, so its context is unknown; ask again while it serves")
        kv_tokens = load_calibration(spec.calibration).kv_tokens(spec.method)
        context_tokens = engine["kv_usage"] * kv_tokens / engine["running"]
        return Measured(Drafts.counted(engine["drafts"], engine["accepted_per_position"]), context_tokens)

    return measure


def _gains(
    options: TuneOptions, served: ModelSettings, replicas: Sequence[ScheduledReplica], requests: RequestTable
) -> list[LoadGain]:
    if all(one.values is None for one in replicas):
        return []
    reference = policy_reference(options.policy, served)
    pools = tuple(tuple(getattr(one, which) for one in replicas) for which in ("spec", "scheduled", "unscheduled"))
    runner = Runner(pools, requests, reference.name, reference.settings)
    jobs = 1 if runner.rounds * len(requests) <= _MIN_PARALLEL_REQUESTS else None
    with all_cores(runner, jobs) as play_all:
        return gains(play_all, len(pools), capacity(play_all), options.seed, REPLICATIONS)


def _verdict(at_loads: Sequence[LoadGain]) -> str:
    """Return in a sentence at which loads the schedules are worth something."""
    loads: dict[str, list[str]] = {_WORTH: [], _NOTHING: [], _WORSE: []}
    for one in at_loads:
        gain = one.gains[0]
        is_worth_it = gain.low > 0 and gain.value >= LEAST_GAIN
        verdict = _WORTH if is_worth_it else _WORSE if gain.high < 0 else _NOTHING
        loads[verdict].append(f"{one.load:.0%}")
    return " ".join(verdict.format(", ".join(at)) for verdict, at in loads.items() if at)


def _document(replicas: Sequence[ScheduledReplica], at_loads: Sequence[LoadGain]) -> Mapping[str, Any]:
    return {
        "replicas": {
            one.spec.name: {
                "method": one.spec.method,
                "reason": one.reason,
                "speculative_config": one.values,
                "accepted": None if one.measured is None else one.measured.drafts.accepted,
                "context_tokens": None if one.measured is None else one.measured.context_tokens,
                "ranges": one.ranges,
            }
            for one in replicas
        },
        "loads": at_loads,
    }


def _print(replicas: Sequence[ScheduledReplica], at_loads: Sequence[LoadGain]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else 120)
    for one in replicas:
        alike = [other.spec.name for other in replicas if other.is_like(one)]
        if alike[0] != one.spec.name:
            continue
        console.print(f"{', '.join(alike)} ({one.spec.method}): " + (one.reason or "new values"))
        if one.values is None or one.measured is None:
            continue
        values = yaml.safe_dump(dict(one.values), default_flow_style=None, sort_keys=False, width=10_000)
        console.print("  speculative_config:\n" + "".join(f"    {line}\n" for line in values.splitlines()), end="")
        shares = ", ".join(f"{share:.0%}" for share in one.measured.drafts.accepted)
        console.print(f"  tokens that draft 1, 2, ... adds to a step: {shares}")
        context = f"{one.measured.context_tokens:,.0f} tokens"
        console.print(f"  mean context: {context}; step times of {one.spec.calibration}")
        console.print(f"  {_by_batch(one)}")
    if not at_loads:
        return
    ks = sorted({one.single_k for one in replicas if one.values is not None})
    single = f"k = {', '.join(map(str, ks))} for all"
    table = Table(title="\nMean time to finish on requests not used for choosing", title_justify="left")
    table.box, table.title_style = box.SIMPLE_HEAD, ""
    for heading in ("load", "requests/s", "present, s", "new, s", "time saved", "95% interval", single):
        table.add_column(heading, justify="right")
    for each in at_loads:
        times = [f"{seconds:.3f}" for seconds in each.seconds[:2]]
        saved, by_single = each.gains
        interval = f"{saved.low:+.1%} to {saved.high:+.1%}"
        gained = [f"{saved.value:+.1%}", interval, f"{by_single.value:+.1%}"]
        table.add_row(f"{each.load:.0%}", f"{each.rate:.2f}", *times, *gained)
    console.print(table)
    console.print(_verdict(at_loads))
    console.print(
        "Under data parallelism vLLM ignores a schedule; its V1 model runner gives up full CUDA graphs for one."
    )


def _by_batch(one: ScheduledReplica) -> str:
    """Return by how much the schedule raises the throughput at some batch sizes."""
    assert one.goodput is not None
    present = min(one.spec.config["num_speculative_tokens"], one.goodput.shape[1] - 1)
    shown = []
    for batch in _SHOWN:
        if batch > len(one.goodput):
            break
        row = one.goodput[batch - 1]
        k = next(k for first, last, k in one.ranges if first <= batch <= last)
        shown.append(f"{row[k] / row[present] - 1:+.1%} at {batch}")
    return f"tokens/s over k = {present}: {', '.join(shown)} requests"
