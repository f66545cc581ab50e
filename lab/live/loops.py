"""Closed loops as an engine served them, for `gateway calibrate` to read."""

from __future__ import annotations

from typing import Any, NamedTuple

from backends.engine_metrics import CountedAcceptance
from backends.speculation import Method
from lab.live.session import LiveOutcome
from lab.live.sweep import Condition
from lab.past.served import EACH


class Counted(NamedTuple):
    """What an engine counted during a loop."""

    acceptance: CountedAcceptance | None
    kv_tokens: int  # capacity of its KV cache; 0 if it does not say


def loop_of(condition: Condition, outcome: LiveOutcome, counted: Counted) -> dict[str, Any]:
    """Return a closed loop for JSON; the endpoint's name is the method."""
    name = outcome.endpoint.name
    first_s = min((record.sent_s for record in outcome.records), default=0.0)
    rows = [
        (
            round(record.sent_s - first_s, 6),
            (record.usage and record.usage.prompt_tokens) or outcome.trace[record.index].prompt_tokens,
            (record.usage and record.usage.cached_tokens) or 0,
            record.output_tokens,
            len(record.chunks_s),  # each is a step of the engine
            round(record.ttft_s, 6),
            round(record.e2e_s, 6),
        )
        for record in outcome.done
    ]
    return {
        "endpoint": name,
        "method": name if name in set(Method) else None,
        "concurrency": condition.at_once,
        "temperature": condition.temperature,
        "each": {column: [row[at] for row in rows] for at, column in enumerate(EACH)},
        **counted._asdict(),
    }
