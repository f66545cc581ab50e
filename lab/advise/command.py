"""Implementation of `gateway advise TRACE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from backends.validation import UsageError
from gateway.advice.advise import SPECULATION, advise, document
from gateway.advice.evidence import ModelEvidence
from gateway.advice.settings import calibration_of
from lab.advise.evidence import evidence_from
from lab.advise.mix import mix_findings
from lab.replay.command import served_model
from lab.trace import BrokenLines, TraceRecord, read_trace


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
    """Return the advice for the model of a trace, as `/admin/advice` has it."""
    broken = BrokenLines(lambda text: print(text, file=sys.stderr))
    try:
        name, served = served_model(options.config, options.model)

        def read() -> Iterator[TraceRecord]:
            kind, files = options.trace_format, list(options.trace)
            records = read_trace(files, format=kind, strict=options.strict, report=broken, in_order=True)
            return islice(records, options.limit)

        evidence, used = evidence_from(read(), name, served, options.calibration)
        known = options.calibration or next(
            filter(None, (calibration_of(served, each) for each in served.backends)), None
        )
        mixes = list(mix_findings(read(), name, served, known)) if used and known is not None else []
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if not used:
        raise UsageError(
            f"no record of the trace has times, output tokens and one of these backends: {_names(evidence)}"
        )
    # A mix is simulated as a whole, so nothing is advised beside it on how single replicas speculate.
    others = [finding for finding in advise(evidence) if not (mixes and finding.rule in SPECULATION)]
    return {
        name: {
            "learns": True,
            "answers": {one.name: round(one.steps.answers) if one.steps else 0 for one in evidence.backends},
            "findings": document([*mixes, *others]),
        }
    }


def _names(evidence: ModelEvidence) -> str:
    return ", ".join(one.name for one in evidence.backends)
