"""Implementation of `gateway advise TRACE`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from backends.validation import UsageError
from gateway.advice.advise import advise, document
from gateway.advice.evidence import ModelEvidence
from lab.advise.evidence import evidence_from
from lab.replay.command import served_model
from lab.trace import BrokenLines, read_trace


@dataclass(frozen=True, slots=True)
class AdviseOptions:
    """Options of the command line; see `gateway advise --help`."""

    trace: tuple[Path, ...]
    config: Path
    model: str | None = None
    calibration: str | None = None
    limit: int | None = None
    trace_format: str | None = None
    strict: bool = False


def from_trace(options: AdviseOptions) -> dict[str, Any]:
    """Return the advice for the model of a trace, as `/admin/advice` has it.

    Raises
    ------
    UsageError
        If trace or pool file cannot be used.
    """
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        name, served = served_model(options.config, options.model)
        records = read_trace(
            list(options.trace), format=options.trace_format, strict=options.strict, report=broken, in_order=True
        )
        evidence, used = evidence_from(islice(records, options.limit), name, served, options.calibration)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if not used:
        raise UsageError(
            f"no record of the trace has times, output tokens and one of these backends: {_names(evidence)}"
        )
    return {
        name: {
            "learns": True,
            "answers": {one.name: round(one.steps.answers) if one.steps else 0 for one in evidence.backends},
            "findings": document(advise(evidence)),
        }
    }


def _names(evidence: ModelEvidence) -> str:
    return ", ".join(one.name for one in evidence.backends)
