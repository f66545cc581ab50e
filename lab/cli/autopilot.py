"""`gateway autopilot` on the command line."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.extras import require
from gateway.cli.policy import DEFAULT_URL
from lab.cli.options import CalibrationOfAll, JsonFile, PoolModel, writable

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Return the seconds of a duration, such as `90s`, `15min`, `2h` or `1d`.

    Raises
    ------
    typer.BadParameter
        If it is none.

    Examples
    --------
    >>> seconds("1.5h")
    5400.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text}: write it as 90s, 15min, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def autopilot(
    *,
    config: Annotated[Path, typer.Option(help="Pool file that the gateway serves.")],
    records: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of its recorder.")],
    model: PoolModel = None,
    calibration: CalibrationOfAll = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to try too; repeatable.  [default: baseline, ngram, and those of the pool file]"),
    ] = None,
    window: Annotated[str, typer.Option(help="How much traffic to plan on, and how long a change is on trial.")] = "2h",
    every: Annotated[str | None, typer.Option(help="Look again after this time.  [default: look once]")] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, help="Least share of the time to finish that a change saves.")
    ] = 0.03,
    restart_time: Annotated[str, typer.Option(help="How long a restart takes a replica out.")] = "180s",
    budget: Annotated[int, typer.Option(min=1, help="Approximate number of mixes to try.")] = 100,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [default: one per core]")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Change the replicas, one at a time.")] = False,
    gateway: Annotated[str, typer.Option(envvar="GATEWAY_URL", help="Address of the gateway.")] = DEFAULT_URL,
    admin: Annotated[str | None, typer.Option(help="Address of its /admin.  [default: that of --gateway]")] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Admin key, or one with the scope `write`."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A client's key that may choose backends, if the gateway has keys.",
        ),
    ] = None,
    floor: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of the replicas that stay up.")] = 0.5,
    most_load: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Most load, as a share of what the others serve."),
    ] = 0.8,
    deployment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BACKEND=[NAMESPACE/]NAME[:CONTAINER]",
            help="Kubernetes Deployment of a backend; repeatable.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Journal.  [default: CONFIG.autopilot.json]"),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Recommend what each replica should run, based on recent traffic; --apply makes the changes.

    Exits 1 if a change failed, 2 if the input is wrong.
    """
    require("lab", "numba", "scipy")
    from lab.autopilot.options import AutopilotOptions
    from lab.autopilot.run import run_autopilot

    pairs = [text.partition("=") for text in deployment or ()]
    if wrong := [name for name, equals, where in pairs if not (name and equals and where)]:
        raise typer.BadParameter(f"{wrong[0]}: write it as BACKEND=NAME", param_hint="--deployment")
    if apply and admin_key_file is None:
        raise typer.BadParameter("needed with --apply", param_hint="--admin-key-file")
    options = AutopilotOptions(
        config=config,
        records=records,
        model=model,
        calibration=calibration,
        methods=tuple(method or ()),
        window_s=seconds(window),
        every_s=None if every is None else seconds(every),
        margin=margin,
        restart_s=seconds(restart_time),
        budget=budget,
        jobs=jobs,
        apply=apply,
        gateway=gateway,
        admin=admin,
        admin_key=_key(admin_key_file) or "",
        key=_key(key_file),
        floor=floor,
        load=most_load,
        deployments={name: where for name, _, where in pairs},
        state=state,
        json_file=json,
    )
    raise typer.Exit(run_autopilot(options, lambda text: typer.echo(f"{datetime.now():%H:%M:%S} {text}")))


def _key(path: Path | None) -> str | None:
    """Return the key in a file."""
    if path is None:
        return None
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: cannot be read: {error}") from None
    if not key:
        raise typer.BadParameter(f"{path}: is empty")
    return key
