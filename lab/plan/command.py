"""Implementation of `gateway plan`."""

from __future__ import annotations

from collections.abc import Sequence

from backends.calibration.calibration import Calibration
from backends.calibration.files import known_calibrations
from backends.calibration.load import load_calibration
from backends.files.draft_config import lowers_context
from backends.speculation import Method, serve_config
from backends.validation import UsageError
from gateway.config.settings import ModelSettings
from gateway.service.default_temperature import assumed_temperature
from gateway.service.replicas import limit_of
from lab.options.policy import named_reference
from lab.options.shared import slo_bounds
from lab.past.check import PastReplay, past_of
from lab.past.pool import simulated_pool
from lab.plan.compared import read_findings
from lab.plan.mixes import USUAL
from lab.plan.options import PlanOptions
from lab.plan.output import helm_values, pool_file
from lab.plan.planning import Replica, plan_windows
from lab.plan.result import PlanObjective
from lab.plan.show import document, said, show
from lab.plan.traffic import sample
from lab.replay.command import served_model
from lab.report.terminal import write_file, write_json
from lab.simulation.table import RequestTable, request_table

_NOTHING_FITS = 1
_MOST_K = 128
_POLICY = "learned"


def run_plan(options: PlanOptions) -> int:
    """Plan, given the command line's options."""
    try:
        objective = PlanObjective(slo_bounds(options.slo))
        model, pool = served_model(options.config, options.model) if options.config else (None, None)
        served = {name: one.method for name, one in pool.backends.items()} if pool else {}
        live = read_findings(options.compared, options.model or model, served)
        machine = _machine(options.calibration, pool)
        temperature = load_calibration(machine).temperature.default if pool is None else assumed_temperature(pool)
        with request_table(options.records(), temperature) as requests:
            calibration, past = _calibrated(machine, pool, requests)
            _, policy = named_reference(options.policy or (pool.policy.name if pool else _POLICY), pool)
            methods = _methods(options.methods)
            traffic = sample(
                requests,
                options.replicas,
                calibration.scheduler.max_model_len,
                limit=options.limit,
                rate=options.rate,
                speed=options.speed,
            )
            planned = plan_windows(
                traffic.windows,
                options,
                calibration,
                policy,
                model=model or calibration.target,
                present=_present(pool),
                methods=methods,
                objective=objective,
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    head = said(planned, objective, past, live)
    show(planned, objective, str(traffic), past, head)
    write_json(options.json_file, document(planned, objective, past, head))
    if planned.plan is None:
        return _NOTHING_FITS
    if options.out is not None:
        write_file(options.out, pool_file(planned, head).encode())
    if options.helm_values is not None:
        write_file(options.helm_values, helm_values(planned, head).encode())
    return 0


def _machine(given: str | None, pool: ModelSettings | None) -> str:
    """Return the calibration of `--calibration`, else the first of a simulated replica."""
    simulated = [one.simulate.calibration for one in pool.backends.values() if one.simulate] if pool else []
    name = given or next(iter(simulated), None)
    if name is None:
        raise UsageError(f"--calibration: name the target model and GPU: {known_calibrations()}")
    return name


def _calibrated(
    machine: str, pool: ModelSettings | None, requests: RequestTable
) -> tuple[Calibration, PastReplay | None]:
    """Return the calibration to plan with, and the replay of the past on the current pool.

    If real replicas of the pool served requests of the trace, their step times are fitted to these, towards the
    machine's calibration.
    """
    if pool is None:
        return load_calibration(machine), None
    past = past_of(simulated_pool(pool, requests, machine=machine), requests)
    real = (one.calibration for one in past.pool.replicas if pool.backends[one.name].simulate is None)
    return load_calibration(next(real, machine)), past


def _present(pool: ModelSettings | None) -> list[Replica]:
    replicas: list[Replica] = []
    for one in pool.backends.values() if pool is not None else ():
        config, limit = serve_config(one.method, one.speculative_config), limit_of(one)
        shortened = limit if lowers_context(one.method, config) else None
        replicas.append((one.method, config, None if shortened is None else shortened.tokens))
    return replicas


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
            ks = list(dict.fromkeys(map(int, numbers.split(",")))) if numbers else usual.get(method, (3,))
        except ValueError:
            raise UsageError(f"--method {text}: write k as {name}=2,3,5") from None
        if numbers and not all(0 < k <= _MOST_K for k in ks):
            raise UsageError(f"--method {text}: k is from 1 to {_MOST_K}")
        parsed.append((method, ks))
    return parsed
