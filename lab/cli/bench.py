"""`gateway bench` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.cli.options import ApiKey, IgnoreEos, JsonFile, Timeout


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
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and intervals.")] = 0,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Sent along; may be given again.")
    ] = None,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    json: JsonFile = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots here.")] = None,
) -> None:
    """Put load on an endpoint or on each replica of a pool, and tell how fast it was. Exits 2 if the input is wrong."""
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
