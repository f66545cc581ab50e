"""Implementation of `gateway plan`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
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
from lab.options.policy import policy_reference
from lab.options.slo import slo_bounds
from lab.plan.mixes import USUAL, calibration_on, machine_of, title
from lab.plan.output import pool_file, replicas, serve_commands
from lab.plan.page import plan_page
from lab.plan.planning import Candidates, Effort, Planned, Replica, plan_windows, windows_of
from lab.plan.search import Objective, Plan
from lab.replay.pace import paced
from lab.replay.request import ReplayRequest, replay_request
from lab.trace import BrokenLines, TraceRecord, read_trace
from policies.features.request import Endpoint

_NOTHING_FITS = 1


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
    limit: int | None = 8000
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
        requests, left_out = _requests(islice(records, options.limit), options, base, served)
        windows = windows_of(requests)
        present = _present(served)
        candidates = Candidates(_methods(options.methods))
        effort = Effort(options.budget, options.seeds, options.jobs, options.ray)
        planned = [
            plan_windows(
                windows, calibration, options.replicas, present, reference, candidates, effort,
                objective=objective, machine=machine,
            )
            for calibration, machine in _machines(base, options.gpus)
        ]  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    used = f"{len(requests):,} requests in {len(windows)} windows"
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


def _requests(
    records: Iterable[TraceRecord], options: PlanOptions, base: Calibration, served: ModelSettings | None
) -> tuple[list[ReplayRequest], int]:
    """Return the requests that the target can serve, and the number of the others."""
    max_model_len = base.scheduler.max_model_len
    kept: list[TraceRecord] = []
    left_out = 0
    for record in records:
        length = record.prompt_tokens + max(1, record.output_tokens or 1)
        if record.endpoint == Endpoint.OTHER or length > max_model_len:
            left_out += 1
        else:
            kept.append(record)
    temperature = assumed_temperature(served) if served is not None else VLLM_DEFAULT
    times = paced(kept, options.rate, options.speed, seed=0) if kept else []
    return [replay_request(record, at_s, temperature) for at_s, record in times], left_out


def _present(served: ModelSettings | None) -> list[Replica]:
    backends = served.backends.values() if served is not None else ()
    return [(one.method, serve_config(one.method, one.speculative_config)) for one in backends]


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
