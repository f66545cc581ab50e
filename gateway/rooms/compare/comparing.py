"""`gateway compare`: which of two ways of serving is better, by live traffic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from backends.validation import UsageError
from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url
from gateway.cli.columns import columns
from gateway.cli.output import AsJson, say, say_json

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Find out on live traffic which of two ways of serving is better, by how much, and from what load on.",
)

Block = Annotated[
    str | None,
    typer.Option(
        help="Length of a block of time, such as 30s.  [default: ten times as long as requests; 10s at least]"
    ),
]
Model = Annotated[str | None, typer.Option(help="The model.  [default: the only one]")]
_UNITS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@app.command()
def start(
    *,
    a: Annotated[str, typer.Option("--a", help="Replicas of the first arm: names, a method, or a source.")] = "",
    b: Annotated[str, typer.Option("--b", help="Replicas of the second arm.")] = "",
    depths: Annotated[str, typer.Option(help="Instead of --a and --b: depths of drafting, such as 0,1,3.")] = "",
    policies: Annotated[str, typer.Option(help="Instead of --a and --b: the present policy and others.")] = "",
    lasts: Annotated[str, typer.Option("--for", help="Longest duration: 90m, 2h, 1d.")] = "2h",
    until: Annotated[str, typer.Option(help="End it if they differ by less than this.")] = "2%",
    whole: Annotated[bool, typer.Option("--whole", help="Run for all of --for, to see quiet and busy hours.")] = False,
    block: Block = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Begin to compare two sets of replicas, depths of drafting, or policies.

    Each request goes to one of them at random, in proportion to their replicas; a conversation stays for some blocks of
    time. It ends by itself once one is better, once they differ by less than --until, or if requests of one fail.

    \b
    gateway compare start --a baseline --b eagle3
    gateway compare start --a b0,b1 --b e0,e1 --for 1d --whole
    gateway compare start --depths 0,1,3
    gateway compare start --policies learned,least_loaded
    """
    asked = {
        "a": a,
        "b": b,
        "depths": _numbers(depths),
        "policies": [each.strip() for each in policies.split(",")] if policies else [],
        "for_s": seconds_of(lasts),
        "until": _share(until),
        "whole": whole,
        "block_s": block and seconds_of(block),
    }
    found = Admin(url, admin_key, model).post("/admin/compare/start", **asked)
    arms = "; ".join(f"{arm}: {', '.join(each['replicas'])}" for arm, each in found["arms"].items())
    lasting = f"{lasts}{'' if whole else ' at most'}, in blocks of {found['block_s']:g} s"
    say(f"Comparing for {lasting}. {arms}.\n`gateway compare status` shows what is known.")


@app.command()
def status(*, json: AsJson = False, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Show what is compared, and what is known so far.

    \b
    gateway compare status
    """
    found = Admin(url, admin_key, model).get("/admin/compare")
    if json:
        say_json(found)
        return
    texts = [_text(name, each) for name, each in found["models"].items()]
    texts += [f"{name}: nothing is compared by itself yet: {why}" for name, why in found["waits"].items()]
    say("\n\n".join(texts) or "Nothing was compared yet.")


@app.command()
def stop(*, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """End a comparison; its result stays.

    \b
    gateway compare stop
    """
    found = Admin(url, admin_key, model).post("/admin/compare/stop")
    say(_text(found["model"], found))


@app.command()
def report(
    out: Annotated[Path, typer.Argument(help="File of the page.")] = Path("comparison.html"),
    *,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Write what was found as a page to send on.

    \b
    gateway compare report finding.html
    """
    from gateway.rooms.compare.report import page

    models = Admin(url, admin_key, model).get("/admin/compare")["models"]
    if not models:
        raise UsageError("nothing was compared yet: begin with `gateway compare start`")
    if len(models) > 1:
        raise UsageError(f"name one with --model: {', '.join(models)}")
    name, document = next(iter(models.items()))
    try:
        out.write_text(page(name, document), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    say(f"{document['sentence']}\nWritten to {out}.")


def _text(name: str, document: dict[str, Any]) -> str:
    from gateway.rooms.compare.report import cost_of, rows_of

    arms = document["arms"]
    rows = [["", *arms], *rows_of(document)]
    lasted = f"{document['minutes']:g} min, {document['blocks']} blocks of {document['block_s']:g} s"
    lines = [f"{name}, {document['stage']} after {lasted}: {document['sentence']}", ""]
    lines += [*columns(rows, left=1), "", cost_of(document)]
    if document["needed_block_s"] is not None:
        lines.append(f"Blocks are too short for these requests: --block {document['needed_block_s']:.0f}s or more.")
    if document["change"]:
        lines += ["", document["change"]]
    return "\n".join(lines)


def seconds_of(text: str) -> float:
    """Return the seconds in a duration as typed, such as `90m`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|m|min|h|d)", text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no time; expected 90s, 30m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")] if text else []
    except ValueError:
        raise UsageError(f"{text!r} are no depths; expected 0,1,3") from None


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if found is None or float(found[1]) >= 100.0:
        raise UsageError(f"{text!r} is no share; expected 2%")
    return float(found[1]) / 100.0
