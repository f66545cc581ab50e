"""Options of `gateway advise`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.policy import DEFAULT_URL, AdminKey, Url
from lab.options.shared import CalibrationOfAll, JsonFile, PoolModel, TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions(TraceOptions):
    """Options of the command line."""

    trace: Annotated[tuple[Path, ...], typer.Argument(help="Traces in any format, instead of a running gateway.")] = ()
    config: Annotated[Path | None, typer.Option(help="Pool file that served the trace.")] = None
    url: Url = DEFAULT_URL
    admin_key: AdminKey = ""
    model: PoolModel = None
    calibration: CalibrationOfAll = None
    json_file: JsonFile = None
