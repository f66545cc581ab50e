"""Implementation of `gateway advise TRACE`."""

from __future__ import annotations

from itertools import islice
from typing import Any

from backends.validation import UsageError
from gateway.advice.advise import advise, document
from lab.advise.evidence import evidence_from
from lab.advise.options import AdviseOptions
from lab.replay.command import served_model


def from_trace(options: AdviseOptions) -> dict[str, Any]:
    """Return the advice for the model of a trace, as `/admin/advice` has it."""
    if options.config is None:
        raise UsageError("--config: a trace needs the pool file that served it")
    try:
        name, served = served_model(options.config, options.model)
        records = islice(options.records(in_order=True), options.limit)
        evidence, used = evidence_from(records, name, served, options.calibration)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if not used:
        names = ", ".join(one.name for one in evidence.backends)
        raise UsageError(f"no record of the trace has times, output tokens and one of these backends: {names}")
    return {
        name: {
            "learns": True,
            "answers": {one.name: round(one.steps.answers) if one.steps else 0 for one in evidence.backends},
            "findings": document(advise(evidence)),
        }
    }
