"""The access log: a line for each ended request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from backends import background
from gateway.rooms.reports.trail import Trail
from gateway.telemetry.log_handler import is_losing

log = logging.getLogger("gateway.access")


class AccessLog:
    """Writes a line for each request to the log."""

    signal = "access_log"

    def __init__(self) -> None:
        log.setLevel(logging.INFO)  # in every worker: all but the first log only errors otherwise

    def write(self, trails: Sequence[Trail]) -> str:
        """Write the lines of requests."""
        for trail in trails:
            with background.guarded("observers", of="the access log"):
                log.info("%s %s %d", trail.method, trail.path, trail.status, extra={"fields": fields_of(trail)})
        return "standard error is not read" if is_losing() else ""

    def close(self) -> None:
        """Do nothing: it holds nothing."""


def fields_of(trail: Trail) -> dict[str, Any]:
    """Return the log fields of a request, without its texts."""
    outcome = trail.outcome
    fields: dict[str, Any] = {
        "request_id": trail.request_id.decode("latin-1"),
        "trace_id": f"{trail.trace_id:032x}" if trail.trace_id else "",
        "key": trail.client,
        "model": trail.model,
        "outcome": trail.label,
        "error": trail.error,
        "e2e_s": round(trail.ended_s - trail.arrived_s, 6),
        "waited_s": round(trail.waited_s, 6),
        "retried_from": trail.retried_from,
        "rescued_from": trail.rescued_from,
    }
    if trail.legs:
        leg = trail.legs[-1]
        fields |= {"backend": leg.decision.backend, "method": leg.method}
        fields |= {"policy": leg.decision.policy, "reason": leg.decision.reason}
    if outcome is not None:
        fields |= {"prompt_tokens": outcome.prompt_tokens, "output_tokens": outcome.output_tokens}
        fields["estimated"] = True if outcome.is_estimated else None
        fields["ttft_s"] = None if outcome.ttft_s is None else round(outcome.ttft_s + trail.waited_s, 6)
        fields["tpot_s"] = None if outcome.tpot_s is None else round(outcome.tpot_s, 6)
        fields["tokens_per_step"] = None if outcome.tokens_per_step is None else round(outcome.tokens_per_step, 3)
    return {name: value for name, value in fields.items() if value not in {None, ""} and (value or name != "waited_s")}
