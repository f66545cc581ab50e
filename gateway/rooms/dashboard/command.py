"""`gateway status`: the pool at a glance, on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from textwrap import wrap
from typing import Annotated, Any, Final

import typer

from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url, failure
from gateway.cli.columns import columns, shortened, terminal_columns
from gateway.cli.output import AsJson, say, say_json

_EACH_S = 2.0
_LEAST_NAME = 8
_WRONG = ("reason", "outlier", "silence", "contradiction", "difference", "trouble")


def status(
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Print it again every two seconds.")] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Show the pool at a glance: state, load, share, failures.

    Shares, requests per second and tokens per step are of the last minute, failures of the last five. The dashboard
    shows the same data.

    \b
    gateway status --watch
    gateway status --json | jq '.models[].backends[] | select(.state != "up").name'
    """
    admin = Admin(url, admin_key)
    while True:
        try:
            _print(admin, as_json=json, clears=watch and sys.stdout.isatty())
        except typer.Exit:
            if not watch:
                raise
        if not watch:
            return
        try:
            time.sleep(_EACH_S)
        except KeyboardInterrupt:
            return


def _print(admin: Admin, *, as_json: bool, clears: bool) -> None:
    document = admin.get("/admin/dashboard/snapshot")
    try:
        lines = [*_lines(document, admin.url, terminal_columns())]
    except (KeyError, TypeError, AttributeError):
        raise failure(f"{admin.url} answers in another form: it is no gateway of this version") from None
    if clears:
        typer.echo("\033[H\033[J", nl=False)
    if as_json:
        say_json(document)
    else:
        say("\n".join(lines))


def _lines(document: dict[str, Any], url: str, width: int) -> Iterator[str]:
    process = document["process"]
    up_min = int(document["at_s"] - process["started_s"]) // 60
    days, hours, minutes = up_min // 1440, up_min // 60 % 24, up_min % 60
    workers = f", {process['workers']} workers" if process["workers"] > 1 else ""
    yield f"gateway {process['version']} at {url}, up {days} d {hours} h {minutes} min{workers}"
    for model in document["models"]:
        backends = model["backends"]
        up = sum(each["up"] for each in backends)
        per_s = sum(each["requests_per_s"] for each in backends)
        said = f"{model['name']}: {model['decides']} decides, {up} of {len(backends)} replicas up"
        said += f", {per_s:.2f} requests/s"
        said += f", {model['waiting']} waiting in the gateway" if model["waiting"] else ""
        gain = model["gain"]
        if gain is not None and gain["ratio"] is not None:
            said += (
                f"; takes {gain['ratio']:.2f} times as long as least_loaded "
                f"({gain['confidence']:.0%} interval {gain['low']:.2f} to {gain['high']:.2f})"
            )
        yield from ("", *wrap(said, width), "")
        rows = [["replica", "method", "k", "state", "running", "waiting", "tokens/step", "failed", "share"]]
        rows += [_cells(each) for each in backends]
        spare = width - max(map(len, columns([row[1:] for row in rows], left=1))) - 2
        for row in rows:
            row[0] = shortened(row[0], max(_LEAST_NAME, spare))
        yield from columns(rows, left=2)
        for each in backends:
            for reason in filter(None, map(each.get, _WRONG)):
                yield from wrap(f"{each['name']}: {reason}", width, subsequent_indent="    ")


def _cells(each: dict[str, Any]) -> list[str]:
    engine, accepted, share = each["engine"], each["acceptance"], each["share"]
    waiting = engine["waiting"] if engine else 0
    return [
        each["name"],
        each["method"],
        f"{each['k'] or '-'}",
        "outlier" if each["outlier"] and each["state"] == "up" else each["state"],
        f"{max(0, each['in_flight'] - waiting):.0f}",
        f"{waiting:.0f}" if engine else "-",
        f"{accepted['tokens_per_step']:.2f}" if accepted else "-",
        f"{each['failed']}",
        "-" if share is None else f"{share:.0%}",
    ]


COMMANDS: Final = {"status": status}
