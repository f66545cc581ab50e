"""Implementation of `gateway plan`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from backends.calibration.calibration import Calibration, calibration_names, load_calibration
from backends.default_temperature import VLLM_DEFAULT
from backends.memory.catalogue import gpu
from backends.memory.estimate import Machine
from backends.speculation import Method, serve_config
from backends.validation import UsageError
from gateway.config.load import load_pool
from gateway.config.settings import ModelSettings, PolicyReference
from gateway.service.default_temperature import assumed_temperature
from lab.evaluate.bootstrap import Interval
from lab.options.policy import policy_reference, with_seed
from lab.options.slo import slo_bounds
from lab.parallel import all_cores, ray_cluster
from lab.plan.mixes import USUAL, Kind, Mix, calibration_on, kind_of, kinds, machine_of, title
from lab.plan.output import pool_file, replicas, serve_commands
from lab.plan.page import plan_page
from lab.plan.search import MixRunner, Objective, Plan, RunAll, Task, find_mix
from lab.replay.pace import paced
from lab.replay.request import ReplayRequest, replay_request
from lab.replay.simulate import Replayed
from lab.trace import BrokenLines, TraceRecord, read_trace
from policies.features.request import Endpoint

_NOTHING_FITS = 1
_PART = 500
_MAX_PARTS = 16
_ROUNDED_TO = 1024


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line; see `gateway plan --help`."""

    trace: tuple[Path, ...]
    replicas: int
    gpus: tuple[str, ...] = ()
    config: Path | None = None
    calibration: str | None = None
    policy: str | None = None
    methods: tuple[str, ...] = ()
    slo: str | None = None
    rate: float | None = None
    speed: float = 1.0
    limit: int | None = _PART * _MAX_PARTS
    budget: int = 200
    seeds: int = 2
    jobs: int | None = None
    ray: str | None = None
    trace_format: str | None = None
    strict: bool = False
    json_file: Path | None = None
    report: Path | None = None
    out: Path | None = None
    simulate: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for one GPU type; `plan` is None if no kind of replica fits."""

    calibration: Calibration
    machine: Machine
    max_model_len: int
    plan: Plan | None
    kinds: tuple[Kind, ...]


def run_plan(options: PlanOptions) -> int:
    """Plan with the options of the command line.

    Returns
    -------
    int
        Exit status: 0 for success, 1 if nothing fits, 2 if the input is wrong.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        objective = Objective(slo_bounds(options.slo))
        served, model = _served(options.config)
        base = _calibration(options, served)
        reference = policy_reference(options.policy, served)
        records = read_trace(
            list(options.trace), format=options.trace_format, strict=options.strict, in_order=True, report=broken
        )
        parts, longest, left_out = _parts(islice(records, options.limit), options, base, served)
        planned = [
            _plan(options, objective, calibration, machine, served, reference, parts, longest)
            for calibration, machine in _machines(base, options.gpus)
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    requests = sum(map(len, parts))
    used = f"{requests:,} requests in {len(parts)} parts"
    used += f"; {left_out:,} left out, longer than the target's context" if left_out else ""
    console.print(used)
    for one in planned:
        _print(console, one, objective, options, model, reference)
    _write(options, planned, objective, model, reference)
    if options.report is not None:
        commands = next((_commands(one, model) for one in planned if one.plan is not None), [])
        trace = ", ".join(path.name for path in options.trace)
        facts = [f"{trace}: {used}", f"{options.replicas} replicas, routed by {reference.name}"]
        options.report.write_text(plan_page(planned, objective, facts, commands), encoding="utf-8")
    return 0 if any(one.plan is not None for one in planned) else _NOTHING_FITS


def _served(config: Path | None) -> tuple[ModelSettings | None, str | None]:
    if config is None:
        return None, None
    models = load_pool(config).models
    if len(models) > 1:
        raise UsageError(f"--config {config} has several models: {', '.join(models)}; plan for one at a time")
    name, served = next(iter(models.items()))
    return served, name


def _calibration(options: PlanOptions, served: ModelSettings | None) -> Calibration:
    if options.calibration is not None:
        return load_calibration(options.calibration)
    simulated = [one.simulate.calibration for one in served.backends.values() if one.simulate] if served else []
    if not simulated:
        raise UsageError(f"--calibration: name the target model and GPU; there are {', '.join(calibration_names())}")
    return load_calibration(simulated[0])


def _machines(base: Calibration, gpus: Sequence[str]) -> list[tuple[Calibration, Machine]]:
    if not gpus:
        return [(base, machine_of(base))]
    machines = []
    for name in gpus:
        calibration = calibration_on(base, name.lower())
        machines.append((calibration, machine_of(calibration, gpu(name))))
    return machines


def _parts(
    records: Iterable[TraceRecord], options: PlanOptions, base: Calibration, served: ModelSettings | None
) -> tuple[tuple[tuple[ReplayRequest, ...], ...], int, int]:
    """Cut the trace into equal parts; return them, the longest request in tokens, and the number left out."""
    max_model_len = base.scheduler.max_model_len
    kept: list[TraceRecord] = []
    left_out = longest = 0
    for record in records:
        length = record.prompt_tokens + max(1, record.output_tokens or 1)
        if record.endpoint == Endpoint.OTHER or length > max_model_len:
            left_out += 1
            continue
        longest = max(longest, length)
        kept.append(record)
    count = max(2, min(_MAX_PARTS, len(kept) // _PART))
    if len(kept) < 2 * count:
        raise UsageError(f"{len(kept)} requests are too few to plan on")
    size = -(-len(kept) // count)
    temperature = assumed_temperature(served) if served is not None else VLLM_DEFAULT
    requests = [
        replay_request(record, at_s, temperature) for at_s, record in paced(kept, options.rate, options.speed, seed=0)
    ]
    return tuple(tuple(requests[start : start + size]) for start in range(0, len(kept), size)), longest, left_out


def _plan(
    options: PlanOptions,
    objective: Objective,
    calibration: Calibration,
    machine: Machine,
    served: ModelSettings | None,
    reference: PolicyReference,
    parts: tuple[tuple[ReplayRequest, ...], ...],
    longest: int,
) -> Planned:
    known = kinds(calibration, machine, longest, _methods(options.methods))
    if not known:
        methods = ", ".join(options.methods)
        raise UsageError(f"no acceptance and draft of {methods} are published for {calibration.target}")
    usable = [index for index, kind in enumerate(known) if kind.fit.fits]
    present = _present(served, calibration, machine, known)
    if not usable:
        return Planned(calibration, machine, longest, None, tuple(known))
    runner = MixRunner(calibration.name, tuple(known), reference.name, with_seed(reference.settings, 0), parts)
    with _runner(runner, options) as run_all:
        plan = find_mix(
            runner,
            usable,
            options.replicas,
            _with_progress(run_all),
            objective=objective,
            present=present,
            budget=options.budget,
            seeds=options.seeds,
        )
    room = min(known[index].fit.tokens - known[index].k for index in plan.chosen)
    rounded = -(-longest // _ROUNDED_TO) * _ROUNDED_TO
    return Planned(calibration, machine, min(rounded, room, calibration.scheduler.max_model_len), plan, tuple(known))


def _methods(methods: Sequence[str]) -> list[tuple[Method, Sequence[int]]]:
    """Return the methods and k to try, from `eagle3` or `eagle3=2,3,5`."""
    if not methods:
        return list(USUAL)
    usual = dict(USUAL)
    parsed: list[tuple[Method, Sequence[int]]] = []
    for text in methods:
        name, _, numbers = text.partition("=")
        if name not in set(Method):
            raise UsageError(f"--method {text}: unknown method {name!r}; the methods are {', '.join(Method)}")
        method = Method(name)
        try:
            ks = [int(number) for number in numbers.split(",")] if numbers else usual.get(method, (3,))
        except ValueError:
            raise UsageError(f"--method {text}: write k as {name}=2,3,5") from None
        parsed.append((method, ks))
    return parsed


def _present(served: ModelSettings | None, calibration: Calibration, machine: Machine, known: list[Kind]) -> Mix | None:
    """Return the mix of the present pool, adding its kinds to `known`."""
    if served is None:
        return None
    mix = []
    for one in served.backends.values():
        config = serve_config(one.method, one.speculative_config)
        kind = kind_of(one.method, config, calibration, machine)
        same = [index for index, other in enumerate(known) if _same(other, kind)]
        if not same:
            known.append(kind)
        mix.append(same[0] if same else len(known) - 1)
    return tuple(sorted(mix))


def _same(one: Kind, other: Kind) -> bool:
    without = [{key: value for key, value in kind.config.items() if key != "model"} for kind in (one, other)]
    return one.method is other.method and one.k == other.k and without[0] == without[1]


@dataclass(frozen=True, slots=True)
class _QuietRunner:
    """A runner that silences the policies' log messages, which concern simulated replicas."""

    runner: MixRunner

    def __call__(self, task: Task) -> Replayed:
        logging.getLogger("policies").setLevel(logging.ERROR)
        return self.runner(task)


def _runner(runner: MixRunner, options: PlanOptions) -> AbstractContextManager[RunAll]:
    work = _QuietRunner(runner)
    return ray_cluster(work, options.ray) if options.ray is not None else all_cores(work, options.jobs)


def _with_progress(run_all: RunAll) -> RunAll:
    """Show progress on a terminal while tasks run."""

    def run(tasks: Sequence[Task]) -> Any:
        columns = (SpinnerColumn(), TextColumn(f"simulating {len(tasks):,} parts of the trace"), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
            progress.add_task("", total=None)
            return run_all(tasks)

    return run


def _print(
    console: Console,
    planned: Planned,
    objective: Objective,
    options: PlanOptions,
    model: str | None,
    reference: PolicyReference,
) -> None:
    known, plan = planned.kinds, planned.plan
    console.print(f"\n{planned.calibration.target} on {planned.machine.title}: {options.replicas} replicas")
    if plan is None:
        console.print("Nothing fits:")
    else:
        console.print(f"Best of {plan.tried:,} mixes tried (of {plan.possible:,}), routed by {reference.name}:")
        console.print(_table(plan, objective))
        if plan.present is not None and len(plan.present) != options.replicas:
            console.print(f"The present mix has {len(plan.present)} replicas, the plan {options.replicas}.")
    for kind in known:
        console.print(f"  {kind.title}: {kind.fit.reason}", markup=False, soft_wrap=True)
    if plan is None:
        return
    console.print("\nTo start them:")
    for line in _commands(planned, model):
        console.print("  " + line, markup=False, soft_wrap=True)


def _commands(planned: Planned, model: str | None) -> list[str]:
    """Return lines that start the replicas of a plan."""
    assert planned.plan is not None
    target, machine = planned.calibration.target, planned.machine
    chosen = replicas(planned.plan.chosen, planned.kinds, machine)
    return serve_commands(model or target, chosen, target=target, machine=machine, max_model_len=planned.max_model_len)


def _table(plan: Plan, objective: Objective) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    kept = bool(objective.slo)
    headings = ["mix", "", "e2e_s", "ttft_s", "tpot_s", *(["SLO kept"] if kept else []), "plan's gain", "better in"]
    for heading in headings:
        is_text = heading in ("mix", "")
        table.add_column(heading, no_wrap=not is_text, justify="left" if is_text else "right")
    for one in plan.judged:
        row = [
            title(one.mix, plan.kinds),
            plan.label(one.mix),
            f"{one.e2e_s:.4g}",
            f"{one.ttft_s:.4g}",
            f"{one.tpot_s:.4g}",
        ]
        row += [f"{one.value:.1%}"] if kept else []
        row += ["", ""] if one.mix == plan.chosen else [_gain(one.gain), f"{one.better_in:.0%}"]
        table.add_row(*row)
    return table


def _gain(gain: Interval | None) -> str:
    return "unknown" if gain is None else f"{gain.value:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"


def _write(
    options: PlanOptions,
    planned: Sequence[Planned],
    objective: Objective,
    model: str | None,
    reference: PolicyReference,
) -> None:
    if options.json_file is not None:
        document = {"plans": [_document(one, objective) for one in planned]}
        options.json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    first = next((one for one in planned if one.plan is not None), None)
    if options.out is None or first is None or first.plan is None:
        return
    settings = reference.settings.model_dump(mode="json", exclude_unset=True)
    text = pool_file(
        model or first.calibration.target,
        {"name": reference.name, **settings},
        replicas(first.plan.chosen, first.kinds, first.machine),
        target=first.calibration.target,
        machine=first.machine,
        max_model_len=first.max_model_len,
        simulate=first.calibration.name if options.simulate else None,
    )
    options.out.write_text(text, encoding="utf-8")


def _document(planned: Planned, objective: Objective) -> dict[str, Any]:
    plan, known = planned.plan, planned.kinds
    document: dict[str, Any] = {
        "calibration": planned.calibration.name,
        "machine": planned.machine.title,
        "objective": "slo" if objective.slo else "e2e_s",
        "kinds": [{"method": kind.method, "k": kind.k, "draft": kind.draft or None, "fit": kind.fit} for kind in known],
    }
    if plan is not None:
        document |= {
            "chosen": title(plan.chosen, known),
            "tried": plan.tried,
            "possible": plan.possible,
            "mixes": [
                {
                    "mix": title(one.mix, known),
                    "is": plan.label(one.mix),
                    "e2e_s": one.e2e_s,
                    "ttft_s": one.ttft_s,
                    "tpot_s": one.tpot_s,
                    "value": one.value,
                    "gain": one.gain,
                    "better_in": one.better_in,
                }
                for one in plan.judged
            ],
        }
    return document
