"""`gateway bench` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.options.shared import ApiKey, IgnoreEos, JsonFile, Timeout


def bench(
    context: typer.Context,
    *,
    url: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]URL", help="Endpoint to measure; repeatable.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Pool file whose replicas are measured in turn.  [default without --url: as for serving]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to request.  [default: the endpoint's first, all of a pool]")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND", help="Replica of the pool to measure; repeatable.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Target to compare with.  [default: the one that does not speculate]"),
    ] = None,
    rate: Annotated[str | None, typer.Option(metavar="R[,R...]", help="Open loop: request rate per second.")] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the open loop's arrivals; 1 is Poisson, less is burstier.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Open loop: trace with TIMESTAMP, ContextTokens, GeneratedTokens."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Closed loop: number of concurrent requests.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(help="Requests per run.  [default: 100, all of a trace]")] = None,
    duration: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds during which a run sends requests.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Unmeasured requests before each run.")] = 0,
    prompts: Annotated[str, typer.Option(metavar="random|repeating|copy", help="Kind of synthetic prompt.")] = "random",
    input_tokens: Annotated[str, typer.Option(metavar="N[-M]", help="Length of synthetic prompts.")] = "512",
    output_tokens: Annotated[
        str | None,
        typer.Option(metavar="N[-M]", help="Maximum length of answers.  [default: 128, or as in the dataset]"),
    ] = None,
    dataset: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts: ShareGPT JSON, or JSON lines.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json that measures ShareGPT texts.")] = None,
    endpoint: Annotated[str, typer.Option(metavar="chat|completions", help="API to use.")] = "chat",
    temperature: Annotated[
        str | None, typer.Option(metavar="T[,T...]", help="Sampling temperature.  [default: the engine's]")
    ] = None,
    k: Annotated[
        str | None, typer.Option(metavar="K[,K...]", help="num_speculative_tokens for the pool's replicas.")
    ] = None,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and intervals.")] = 0,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Header to send with every request; repeatable.")
    ] = None,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write an HTML report with plots to.")
    ] = None,
) -> None:
    """Put load on an endpoint or on each replica of a pool, and report its speed. Exits 2 if the input is wrong."""
    from lab.bench.command import bench as run

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
