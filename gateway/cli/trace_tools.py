"""`gateway evaluate`, `replay`, `tune` and `plan` on the command line: what a trace can answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import (
    ApiKey,
    CalibrationOfAll,
    IgnoreEos,
    JsonFile,
    Limit,
    PoolModel,
    Rate,
    Slo,
    Speed,
    Strict,
    TraceFormat,
    Traces,
    above_zero,
    refuse_rate_with_speed,
    writable,
)


def evaluate(
    trace: Traces,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE.yaml|{...}", help="Policy to evaluate; again.  [default: the pool's own]"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Pool file: k and weight of each replica, and the policies' settings.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Whose requests.  [default: the first's]")] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    limit: Limit = None,
    seed: Annotated[int, typer.Option(help="Of resampling, and of policies that draw.")] = 0,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What policies know: written by `gateway replay --state`.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Tell from recorded requests what other policies would have given. Exits 1 if the record cannot tell of any."""
    from lab.evaluate.command import run_evaluate

    raise typer.Exit(
        run_evaluate(
            trace=tuple(trace),
            policy=tuple(policy or ()),
            config=config,
            model=model,
            trace_format=trace_format,
            strict=strict,
            limit=limit,
            seed=seed,
            json_file=json,
            state=state,
        )
    )


def replay(
    trace: Traces,
    *,
    config: Annotated[
        Path | None, typer.Option(help="Pool file: the replicas, simulated, and the policies' settings.")
    ] = None,
    live: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Send the trace to this endpoint instead; may be given again."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.yaml|{...}",
            help="Policy to replay with; again. `clairvoyant` knows lengths and acceptance.  [default: the pool's own]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of a pool of several; with --live, to ask for.  [default: the request's; the first listed]"),
    ] = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    warmup: Annotated[int, typer.Option(min=0, help="First requests that do not count.")] = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of what is drawn; simulated, the same gives the same figures.  [default: 0; of --live texts none]"
        ),
    ] = None,
    slo: Slo = None,
    calibration: CalibrationOfAll = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=writable, help="What was learned: read if it is there, written at the end."
        ),
    ] = None,
    api_key: ApiKey = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", callback=above_zero, help="With --live: a request that takes longer failed.")
    ] = 600.0,
    ignore_eos: IgnoreEos = False,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", callback=writable, help="Write a page here.")
    ] = None,
) -> None:
    """Play a trace on simulated replicas with each policy in the loop, or send it to a running endpoint; compare."""
    refuse_rate_with_speed(rate, speed)
    if live:
        for option, given in (("--config", config), ("--calibration", calibration), ("--state", state)):
            if given is not None:
                raise typer.BadParameter("is for simulated replicas; leave it out with --live", param_hint=option)
        from lab.live.command import run_live
        from lab.live.session import LiveOptions

        raise typer.Exit(
            run_live(
                LiveOptions(
                    trace=tuple(trace),
                    urls=tuple(live),
                    policies=tuple(policy or ()),
                    model=model,
                    rate=rate,
                    speed=speed,
                    limit=limit,
                    warmup=warmup,
                    seed=seed,
                    slo=slo,
                    api_key=api_key,
                    timeout_s=timeout,
                    ignore_eos=ignore_eos,
                    trace_format=trace_format,
                    strict=strict,
                    json_file=json,
                    report=report,
                )
            )
        )
    if config is None:
        raise typer.BadParameter("give the pool to simulate, or --live URL", param_hint="--config")
    if ignore_eos:
        raise typer.BadParameter("goes only with --live", param_hint="--ignore-eos")
    from lab.replay.command import ReplayOptions, run_replay

    raise typer.Exit(
        run_replay(
            ReplayOptions(
                trace=tuple(trace),
                config=config,
                policies=tuple(policy or ()),
                model=model,
                rate=rate,
                speed=speed,
                limit=limit,
                warmup=warmup,
                seed=seed or 0,
                slo=slo,
                calibration=calibration,
                state=state,
                trace_format=trace_format,
                strict=strict,
                json_file=json,
                report=report,
            )
        )
    )


def tune(
    trace: Traces,
    *,
    config: Annotated[Path, typer.Option(help="Pool file: the replicas, simulated, and the present rules.")],
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", callback=writable, help="Write the rules here.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE.yaml|{...}", help="Rules to begin with.  [default: the pool's; the default rules]"),
    ] = None,
    objective: Annotated[str, typer.Option(metavar="mean|p99|goodput", help="Of the time to finish.")] = "mean",
    slo: Slo = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings to try.")] = 100,
    part: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the trace to tune on, its first.")] = 0.6,
    model: PoolModel = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Requests to play at most, roughly, before the rest judges.")
    ] = 6_000_000,
    seed: Annotated[int, typer.Option(help="Of the search, and of what is drawn.")] = 0,
    calibration: CalibrationOfAll = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
) -> None:
    """Search the numbers in the rules on the first part of a trace by replay, and judge them on the rest."""
    from lab.replay.command import ReplayOptions
    from lab.tune.command import TuneOptions, run_tune

    refuse_rate_with_speed(rate, speed)
    replayed = ReplayOptions(
        trace=tuple(trace),
        config=config,
        model=model,
        rate=rate,
        speed=speed,
        limit=limit,
        seed=seed,
        slo=slo,
        calibration=calibration,
        trace_format=trace_format,
        strict=strict,
        json_file=json,
    )
    raise typer.Exit(run_tune(TuneOptions(replayed, out, policy, objective, trials, part, budget)))


def plan(
    trace: Traces,
    *,
    replicas: Annotated[int, typer.Option(min=1, help="How many replicas there are to be.")],
    gpu: Annotated[
        list[str] | None, typer.Option(help="GPU to plan for, as h200; again.  [default: the calibration's]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Pool file: the present mix and its policy.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Target and step times, as llama-3.1-8b-h100.  [default: the pool's]")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml|{...}", help="That routes.  [default: the pool's; thresholds]")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD[=K,K...]", help="Method to try, with its k; again.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Seek the most requests within these seconds.")
    ] = None,
    rate: Rate = None,
    speed: Speed = 1.0,
    limit: Limit = 16_000,
    budget: Annotated[int, typer.Option(min=1, help="Mixes to try, about.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the last comparison.")] = 2,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: one a core]")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to run on; `local` starts one.")
    ] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="Write the plan here, as a pool file.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Of simulated replicas, to try it.")] = False,
) -> None:
    """Find the mix of replicas that serves a trace best, and whether it fits. Exits 1 if nothing does."""
    from lab.plan.command import PlanOptions, run_plan

    refuse_rate_with_speed(rate, speed)
    raise typer.Exit(
        run_plan(
            PlanOptions(
                trace=tuple(trace),
                replicas=replicas,
                gpus=tuple(gpu or ()),
                config=config,
                calibration=calibration,
                policy=policy,
                methods=tuple(method or ()),
                slo=slo,
                rate=rate,
                speed=speed,
                limit=limit,
                budget=budget,
                seeds=seeds,
                jobs=jobs,
                ray=ray,
                trace_format=trace_format,
                strict=strict,
                json_file=json,
                out=out,
                simulate=simulate,
            )
        )
    )
