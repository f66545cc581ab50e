"""Options of `gateway calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lab.options.shared import writable


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Options of the command line."""

    measured: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="[KIND=]FILE...", help="Files of `gateway replay --json`, and the kind of their text."),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", callback=writable, help="Calibration to write.")]
    hardware: Annotated[str, typer.Option(help="What a replica ran on, such as '2x RTX-4090'.")]
    like: Annotated[
        str, typer.Option(metavar="NAME|FILE.yaml[@GPU]", help="Calibration to start from, of a like model.")
    ] = "llama-3.1-8b-h100"
    target: Annotated[str | None, typer.Option(help="Name of the target model.  [default: that of --like]")] = None
