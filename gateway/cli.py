"""The command line: `gateway` serves a pool; `check` and `schema` look at one, `bench` measures one, `trace` traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.policy_command import app as policy_app
from gateway.trace.command import app as trace_app

if TYPE_CHECKING:
    from gateway.settings import PoolSettings

_DEFAULT_CONFIG = Path("config/pool.yaml")
_WRONG_FILE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(trace_app, name="trace")
app.add_typer(policy_app, name="policy")


def main() -> None:
    """Run the command line: what the installed command `gateway` calls."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from gateway import __version__

        typer.echo(f"gateway {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    *,
    config: Annotated[Path, typer.Option(help="The pool file.")] = _DEFAULT_CONFIG,
    host: Annotated[str | None, typer.Option(help="Address to listen at, instead of the file's.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that serve.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve one OpenAI-compatible endpoint in front of a pool of unlike vLLM replicas."""
    if context.invoked_subcommand is not None:
        context.obj = config
        return
    settings = _load(config)
    given = {"host": host, "port": port, "workers": workers}
    chosen = {name: value for name, value in given.items() if value is not None}
    server = settings.server.model_copy(update=chosen)

    from gateway.serve import serve as run

    raise typer.Exit(run(settings.model_copy(update={"server": server}), config))


@app.command()
def check(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
) -> None:
    """Check a pool file as at start, and print its pool, serving nothing. Exits 2 if anything is wrong."""
    settings = _load(config or context.obj)

    from rich.console import Console

    from gateway.recorder import recorder_fault
    from gateway.state.place import describe
    from gateway.summary import pool_table

    if settings.recorder is not None and (fault := recorder_fault(settings.recorder)):
        typer.echo(f"{config or context.obj}: {fault}", err=True)
        raise typer.Exit(_WRONG_FILE)
    Console().print(pool_table(settings))
    typer.echo(describe(settings.state))


@app.command()
def schema() -> None:
    """Print the JSON schema of a pool file."""
    from gateway.schema import schema_text

    typer.echo(schema_text(), nl=False)


@app.command()
def bench(
    context: typer.Context,
    *,
    url: Annotated[list[str] | None, typer.Option(metavar="[NAME=]URL", help="Endpoint; may be given again.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Pool file: each of its replicas in turn.  [default without --url: as for serving]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for.  [default: the first; of a pool all]")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND", help="Replica of the pool to take; again.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to compare with.  [default: what does not speculate]")
    ] = None,
    rate: Annotated[str | None, typer.Option(metavar="R[,R...]", help="Open loop: requests per second.")] = None,
    burstiness: Annotated[float, typer.Option(help="Of the open loop; 1 is Poisson, less is burstier.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Open loop: TIMESTAMP, ContextTokens, GeneratedTokens.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Closed loop: requests under way at all times.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(help="Requests a run.  [default: 100, of a trace all]")] = None,
    duration: Annotated[float | None, typer.Option(metavar="S", help="Seconds that a run sends for.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests before each run that do not count.")] = 0,
    prompts: Annotated[str, typer.Option(metavar="random|repeating|copy", help="Kind of synthetic prompt.")] = "random",
    input_tokens: Annotated[str, typer.Option(metavar="N[-M]", help="Length of synthetic prompts.")] = "512",
    output_tokens: Annotated[
        str | None, typer.Option(metavar="N[-M]", help="Limit of the answers.  [default: 128; of a dataset its own]")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(metavar="FILE", help="ShareGPT's JSON, or JSON lines.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to measure ShareGPT's texts by.")] = None,
    endpoint: Annotated[str, typer.Option(metavar="chat|completions", help="The API to use.")] = "chat",
    temperature: Annotated[str | None, typer.Option(metavar="T[,T...]", help="[default: the engine's]")] = None,
    k: Annotated[
        str | None, typer.Option(metavar="K[,K...]", help="num_speculative_tokens to start a pool's replicas with.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Let answers run to their limit (vLLM).")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and intervals.")] = 0,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Sent along; may be given again.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For endpoints given by --url.")] = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="A request that takes longer failed.")] = 600.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots here.")] = None,
) -> None:
    """Put load on an endpoint or on each replica of a pool, and tell how fast it was. Exits 2 if the input is wrong."""
    from gateway.bench.command import bench as run

    raise typer.Exit(
        run(
            url=tuple(url or ()),
            config=config or (None if url else context.obj),
            model=model,
            only=tuple(only or ()),
            baseline=baseline,
            rate=rate,
            burstiness=burstiness,
            trace=trace,
            concurrency=concurrency,
            num_requests=num_requests,
            duration_s=duration,
            warmup=warmup,
            prompts=prompts,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            dataset=dataset,
            tokenizer=tokenizer,
            endpoint=endpoint,
            temperature=temperature,
            k=k,
            ignore_eos=ignore_eos,
            seed=seed,
            header=tuple(header or ()),
            api_key=api_key,
            timeout_s=timeout,
            json_file=json,
            html_file=html,
        )
    )


@app.command()
def evaluate(
    trace: Annotated[list[Path], typer.Argument(help="Recorded requests: files, or folders of them.")],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE.yaml|{...}", help="Policy to evaluate; again.  [default: the pool's own]"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Pool file: k and weight of each replica, and the policies' settings.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Whose requests.  [default: the first's]")] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="The trace's, where it cannot be told.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a trace with a broken line.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests to use at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of resampling, and of policies that draw.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Tell from recorded requests what other policies would have given. Exits 1 if the record cannot tell of any."""
    from gateway.evaluate_command import run_evaluate

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
        )
    )


@app.command()
def replay(
    trace: Annotated[list[Path], typer.Argument(help="Requests to replay: a trace in any format.")],
    *,
    config: Annotated[Path, typer.Option(help="Pool file: the replicas, simulated, and the policies' settings.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.yaml|{...}",
            help="Policy to replay with; again. `clairvoyant` knows lengths and acceptance.  [default: the pool's own]",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of a pool of several.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second on average; the trace's pattern is kept.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Times as fast as in the trace.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests of the trace to use at most.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="First requests that do not count.")] = 0,
    seed: Annotated[int, typer.Option(help="Of what is drawn; the same seed gives the same figures.")] = 0,
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Bounds in seconds that goodput counts by.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Step times of all replicas.  [default: each one's own in the pool]")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What was learned: read if it is there, written at the end.")
    ] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="The trace's, where it cannot be told.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a trace with a broken line.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page here.")] = None,
) -> None:
    """Play a trace on simulated replicas with each policy in the loop, and compare."""
    from gateway.replay_command import ReplayOptions, run_replay

    if rate is not None and speed != 1.0:
        raise typer.BadParameter("takes the place of --speed; give one of the two", param_hint="--rate")
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
                seed=seed,
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


@app.command()
def tune(
    trace: Annotated[list[Path], typer.Argument(help="Requests to tune on: a trace in any format.")],
    *,
    config: Annotated[Path, typer.Option(help="Pool file: the replicas, simulated, and the present rules.")],
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", help="Write the rules here.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE.yaml|{...}", help="Rules to begin with.  [default: the pool's; the default rules]"),
    ] = None,
    objective: Annotated[str, typer.Option(metavar="mean|p99|goodput", help="Of the time to finish.")] = "mean",
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=S,tpot=S,e2e=S", help="Bounds in seconds that goodput counts by.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings to try.")] = 100,
    part: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the trace to tune on, its first.")] = 0.6,
    model: Annotated[str | None, typer.Option(help="Of a pool of several.")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests per second on average.")] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Times as fast as in the trace.")] = 1.0,
    limit: Annotated[int, typer.Option(min=2, help="Requests of the trace to use at most.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the search, and of what is drawn.")] = 0,
    calibration: Annotated[
        str | None, typer.Option(help="Step times of all replicas.  [default: each one's own in the pool]")
    ] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="The trace's, where it cannot be told.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a trace with a broken line.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Search the numbers in the rules on the first part of a trace by replay, and judge them on the rest."""
    from gateway.replay_command import ReplayOptions
    from gateway.tune_command import TuneOptions, run_tune

    if rate is not None and speed != 1.0:
        raise typer.BadParameter("takes the place of --speed; give one of the two", param_hint="--rate")
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
    raise typer.Exit(run_tune(TuneOptions(replayed, out, policy, objective, trials, part)))


@app.command()
def plan(
    trace: Annotated[list[Path], typer.Argument(help="Requests to plan for: a trace in any format.")],
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
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests per second, instead of the trace's.")] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Times as fast as in the trace.")] = 1.0,
    limit: Annotated[int, typer.Option(min=4, help="Requests of the trace to use at most.")] = 16_000,
    budget: Annotated[int, typer.Option(min=1, help="Mixes to try, about.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the last comparison.")] = 2,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: one a core]")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to run on; `local` starts one.")
    ] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="The trace's, where it cannot be told.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a trace with a broken line.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan here, as a pool file.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Of simulated replicas, to try it.")] = False,
) -> None:
    """Find the mix of replicas that serves a trace best, and whether it fits. Exits 1 if nothing does."""
    from gateway.plan_command import PlanOptions, run_plan

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


def _load(path: Path) -> PoolSettings:
    from gateway.config import ConfigError, load_pool
    from gateway.state.place import with_place

    try:
        return with_place(load_pool(path), path)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        sys.exit(_WRONG_FILE)
