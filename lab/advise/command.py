"""Implementation of `gateway advise TRACE`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from backends.validation import UsageError
from gateway.advice.advise import SPECULATION, advise, document
from gateway.advice.evidence import ModelEvidence
from gateway.advice.settings import calibration_of
from lab.advise.evidence import evidence_from
from lab.advise.mix import mix_findings
from lab.advise.options import AdviseOptions
from lab.replay.command import served_model
from lab.trace import TraceRecord


def from_trace(options: AdviseOptions) -> dict[str, Any]:
    """Return the advice for the model of a trace, as `/admin/advice` has it."""
    if options.config is None:
        raise UsageError("--config: a trace needs the pool file that served it")
    try:
        name, served = served_model(options.config, options.model)

        def read() -> Iterator[TraceRecord]:
            return islice(options.records(in_order=True), options.limit)

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
