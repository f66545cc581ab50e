"""Implementation of `gateway replay --live`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from secrets import token_hex
from typing import Any

import numpy as np
import uvloop
from rich.table import Table

from backends.engine_metrics import CountedAcceptance
from backends.validation import UsageError
from lab.live.endpoints import LiveEndpoint, endpoints_of, engine_counters, inspect_endpoint
from lab.live.loops import Counted, loop_of
from lab.live.session import LiveLoad, LiveOutcome, Session
from lab.live.sweep import Condition, loads_of
from lab.options.shared import slo_bounds
from lab.replay.comparison import of_runs, verdict
from lab.replay.figures import figures_tables
from lab.replay.options import ReplayOptions
from lab.replay.page import ReplayPage
from lab.report.terminal import report, write_json
from lab.simulation.table import Traits

_FAILED = 1
_INTERRUPTED = 130


Sent = dict[Condition, dict[str, tuple[LiveOutcome, Counted]]]
"""Outcome of each load, by the name of its row."""


def run_live(options: ReplayOptions) -> int:
    """Send a trace to each endpoint, given the command line's options."""
    sent: Sent = {}
    try:
        slo = slo_bounds(options.slo)
        endpoints = endpoints_of(options.live, options.model, options.api_key)
        loads = loads_of(options)
        session = Session(warmup=options.warmup, timeout_s=options.timeout_s, ignore_eos=options.ignore_eos)
        uvloop.run(session.run(_send(session, endpoints, loads, options.seed, sent)))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if not sent:
        print("gateway replay: stopped before the trace was sent", file=sys.stderr)
        return _INTERRUPTED
    outcomes = {name: one for by_name in sent.values() for name, (one, _) in by_name.items()}
    figures = {name: one.figures(slo) for name, one in outcomes.items()}
    document: dict[str, Any] = {
        "trace": [path.name for path in options.trace],
        "model": ", ".join(dict.fromkeys(one.model for one in outcomes.values())),
        "requests": sum(len(load.trace) - options.warmup for load in loads.values()),
        "warmup": options.warmup,
        "seed": options.seed or 0,
        "slo": slo,
        "live": {one.name: one.url for one in endpoints},
        "interrupted": session.stopped,
        "policies": figures,
        "loops": [loop_of(at, *one) for at, rows in sent.items() if at.at_once for one in rows.values()],
    }
    pages = {at: _rows({name: one for name, (one, _) in by_name.items()}) for at, by_name in sent.items()}
    verdicts = [
        (f"{at}: " if len(loads) > 1 else "") + verdict(page.played, page.compared) for at, page in pages.items()
    ]
    is_undecided = session.stopped and len(endpoints) > 1
    document["verdict"] = "Stopped early: nobody won." if is_undecided else "\n".join(verdicts)
    parts = _said(document, outcomes, slo, sum(load.left_out for load in loads.values()))
    title = f"gateway replay of {', '.join(document['trace'])}"
    report(title, parts, options.report, lambda: "".join(page.drawn() for page in pages.values()))
    write_json(options.json_file, document)
    if session.stopped:
        return _INTERRUPTED
    return 0 if all(one["requests"] for one in figures.values()) else _FAILED


async def _send(
    session: Session,
    endpoints: Sequence[LiveEndpoint],
    loads: Mapping[Condition, LiveLoad],
    seed: int | None,
    sent: Sent,
) -> None:
    """Inspect all endpoints, then send each load to each; add the outcomes of all started runs to `sent`."""
    apis = {api for load in loads.values() for api in load.apis}
    infos = [await inspect_endpoint(endpoint, apis, seed or 0) for endpoint in endpoints]
    # By default texts differ between runs, so that no prefix cache contains them.
    texts = token_hex(8) if seed is None else str(seed)
    runs = product(loads.items(), zip(endpoints, infos, strict=True))
    for number, ((condition, load), (endpoint, info)) in enumerate(runs):
        if session.stopped:
            return
        before = await engine_counters(endpoint) if condition.at_once else None
        outcome = await session.send(endpoint, info, load, f"{texts}/{number}")
        after = await engine_counters(endpoint) if condition.at_once else None
        counted = Counted(CountedAcceptance.between(before, after), after.kv_tokens if after is not None else 0)
        name = endpoint.name if len(loads) == 1 else f"{endpoint.name}, {condition}"
        sent.setdefault(condition, {})[name] = outcome, counted


def _rows(outcomes: Mapping[str, LiveOutcome]) -> ReplayPage:
    """Return the contents of the page."""
    played = {name: one.replayed()[0] for name, one in outcomes.items()}
    trace = next(iter(outcomes.values())).trace
    served = {name: result for name, result in played.items() if len(result.e2e_s)}
    traits = Traits(
        [record.workload for record in trace],
        np.array([math.nan if record.temperature is None else record.temperature for record in trace]),
        np.array([record.prompt_tokens for record in trace], np.int64),
    )
    return ReplayPage(played, traits, of_runs(served, traits), "endpoint")


def _said(
    document: dict[str, Any], outcomes: Mapping[str, LiveOutcome], slo: Mapping[str, float], left_out: int
) -> list[str | Table]:
    """Return the contents of the terminal output."""
    stopped = ", stopped: unfinished requests are not included" if document["interrupted"] else ""
    parts: list[str | Table] = [
        document["verdict"],
        f"{document['requests']:,} requests for {document['model']}{stopped}",
        "",
    ]
    parts += figures_tables(document["policies"], slo, "endpoint")
    if left_out:
        parts.append(f"{left_out:,} more generate no text and are left out.")
    parts += [f"{name}: {line}" for name, one in outcomes.items() for line in one.remarks()]
    gateways = dict.fromkeys(one.endpoint.url for name, one in outcomes.items() if document["policies"][name]["shares"])
    hint = "If {0} compares meanwhile: `gateway compare report --url {0}`, or with the address of its `admin.listen`."
    return parts + [hint.format(url) for url in gateways]
