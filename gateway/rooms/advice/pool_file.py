"""Rule: a pool file that does not say what an engine does."""

from __future__ import annotations

from typing import Final

from backends.speculation import Method
from gateway.rooms.advice.evidence import BackendEvidence, Contradiction, ModelEvidence
from gateway.rooms.advice.finding import Finding, lines

_WORTH: Final = "a pool file that says what runs"


def pool_file(model: ModelEvidence) -> list[Finding]:
    """Return the backends whose engines contradict the pool file, with what it should say."""
    return [
        Finding(
            "pool_file",
            model.name,
            backend.name,
            found.text,
            None,
            found.counters,
            _change(model, backend, found),
            _WORTH,
        )
        for backend in model.backends
        if (found := backend.contradiction) is not None
    ]


def _change(model: ModelEvidence, backend: BackendEvidence, found: Contradiction) -> str:
    method, k = found.observed.method, found.observed.schedule.k
    if method is Method.BASELINE:
        changes = (f"method: baseline # {backend.method}; or start the engine with --speculative-config",)
    else:
        known = method is backend.method
        said = () if known else (f"method: ... # {backend.method}; see the engine's --speculative-config",)
        changes = (
            *said,
            "speculative_config:",
            f"  num_speculative_tokens: {k}" + (f" # {backend.k}" if backend.k else ""),
        )
    return lines(model.name, backend.name, *changes)
