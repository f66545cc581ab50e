"""Implementation of `gateway replay --live`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from secrets import token_hex
from typing import Any

import numpy as np
import uvloop
from rich.table import Table

from backends.validation import UsageError
from lab.live.endpoints import LiveEndpoint, endpoints_of, inspect_endpoint
from lab.live.session import LiveLoad, LiveOutcome, Session
from lab.options.shared import slo_bounds
from lab.replay.comparison import of_runs, verdict
from lab.replay.figures import figures_tables
from lab.replay.options import ReplayOptions
from lab.replay.pace import paced
from lab.replay.page import PageData
from lab.report.terminal import report, write_json
from lab.simulation.table import Traits

_FAILED = 1
_INTERRUPTED = 130


def run_live(options: ReplayOptions) -> int:
    """Send a trace to each endpoint with the options of the command line."""
    try:
        slo = slo_bounds(options.slo)
        endpoints = endpoints_of("--live", options.live, options.model, options.api_key)
        records = islice(options.records(in_order=True), options.limit)
        load = LiveLoad.of(paced(records, options.rate, options.speed, options.seed or 0), options.warmup)
        session = Session(warmup=options.warmup, timeout_s=options.timeout_s, ignore_eos=options.ignore_eos)
        outcomes: list[LiveOutcome] = []
        uvloop.run(session.run(_send(session, endpoints, load, options.seed, outcomes)))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if not outcomes:
        print("gateway replay: stopped before the trace was sent", file=sys.stderr)
        return _INTERRUPTED
    figures = {one.endpoint.name: one.figures(slo) for one in outcomes}
    document: dict[str, Any] = {
        "trace": [path.name for path in options.trace],
        "model": ", ".join(dict.fromkeys(one.model for one in outcomes)),
        "requests": len(load.trace) - options.warmup,
        "warmup": options.warmup,
        "seed": options.seed or 0,
        "slo": slo,
        "live": {one.name: one.url for one in endpoints},
        "interrupted": session.stopped,
        "policies": figures,
    }
    rows = _rows(outcomes)
    document["verdict"] = "Stopped early: nobody won." if session.stopped else verdict(rows.played, rows.compared)
    parts = _said(document, outcomes, slo, load.left_out)
    report(f"gateway replay of {', '.join(document['trace'])}", parts, options.report, lambda: rows.drawn("endpoint"))
    write_json(options.json_file, document)
    if session.stopped:
        return _INTERRUPTED
    return 0 if all(one["requests"] for one in figures.values()) else _FAILED


async def _send(
    session: Session, endpoints: Sequence[LiveEndpoint], load: LiveLoad, seed: int | None, outcomes: list[LiveOutcome]
) -> None:
    """Inspect all endpoints, then send the load to each; add the outcomes of the runs that were started."""
    infos = [await inspect_endpoint(endpoint, load.apis, seed or 0) for endpoint in endpoints]
    # By default texts differ from run to run, so that no prefix cache has them.
    texts = token_hex(8) if seed is None else str(seed)
    for index, (endpoint, info) in enumerate(zip(endpoints, infos, strict=True)):
        if not session.stopped:
            outcomes.append(await session.send(endpoint, info, load, f"{texts}/{index}"))


def _rows(outcomes: Sequence[LiveOutcome]) -> PageData:
    """Return what the page draws."""
    played = {one.endpoint.name: one.replayed()[0] for one in outcomes}
    trace = outcomes[0].trace
    unknown = math.nan
    served = {name: result for name, result in played.items() if len(result.e2e_s)}
    traits = Traits(
        [record.workload for record in trace],
        np.array([unknown if record.temperature is None else record.temperature for record in trace]),
        np.array([record.prompt_tokens for record in trace], np.int64),
    )
    return PageData(played, traits, of_runs(served, traits))


def _said(
    document: dict[str, Any], outcomes: Sequence[LiveOutcome], slo: Mapping[str, float], left_out: int
) -> list[str | Table]:
    """Return what stands on the terminal."""
    stopped = ", stopped: unfinished requests are not included" if document["interrupted"] else ""
    parts: list[str | Table] = [
        document["verdict"],
        f"{document['requests']:,} requests for {document['model']}{stopped}",
        "",
    ]
    parts += figures_tables(document["policies"], slo, "endpoint")
    if left_out:
        parts.append(f"{left_out:,} requests of the trace generate no text and are left out.")
    return [*parts, *(f"{one.endpoint.name}: {line}" for one in outcomes for line in one.remarks())]
