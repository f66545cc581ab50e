"""Options of `gateway tune`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lab.options.shared import (
    CalibrationOfAll,
    JsonFile,
    PacedOptions,
    PoolModel,
    Replications,
    Slo,
    writable,
)


class Goal(StrEnum):
    """The goal: mean or p99 of the time to finish, or the share of requests that keep the SLO."""

    MEAN = "mean"
    P99 = "p99"
    GOODPUT = "goodput"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(PacedOptions):
    """Options of the command line."""

    config: Annotated[Path, typer.Option(help="Pool file with the replicas to simulate and the present rules.")]
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", callback=writable, help="File to write the rules to.")]
    schedule: Annotated[bool, typer.Option(help="Compare k fixed, by batch size and adaptive, in place of rules.")] = (
        False
    )
    objective: Annotated[Goal, typer.Option(metavar="mean|p99|goodput", help="Time to finish, or goodput.")] = Goal.MEAN
    replications: Replications = None
    slo: Slo = None
    trials: Annotated[int, typer.Option(min=1, help="Number of settings to try.")] = 100
    part: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the trace to tune on, from its start.")] = 0.6
    model: PoolModel = None
    seed: Annotated[int, typer.Option(help="Seed of the search and the simulation.")] = 0
    calibration: CalibrationOfAll = None
    json_file: JsonFile = None
