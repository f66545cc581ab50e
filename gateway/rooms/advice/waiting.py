"""Rules: requests wait for room in the KV cache, or for a place in the batch."""

from __future__ import annotations

from typing import Final

import numpy as np

from backends.launch.vllm_command import flag_value
from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence
from gateway.rooms.advice.finding import Finding, Gain, flag_change, gain_of

_MIN_MINUTES: Final = 10
_DRAWS: Final = 400
_MOST_UTILIZATION: Final = 0.95
_DEFAULT_UTILIZATION: Final = 0.92
_DEFAULT_SEQUENCES: Final = 256
"""Fewest places that vLLM gives a batch by itself; what a foreign engine has is not told."""
_OF: Final = "time that requests spend in the engine"


def waiting(model: ModelEvidence) -> list[Finding]:
    """Return the backends whose requests wait for memory, and those whose batch is limited although there is some.

    By Little's law, the share of the requests in an engine that wait is the share of their time that they wait. The
    interval is a bootstrap over minutes.
    """
    findings = []
    for backend in model.backends:
        if len(backend.minutes) < _MIN_MINUTES:
            continue
        room = _gain(backend, np.array([minute.waiting_for_room for minute in backend.minutes]))
        places = int(flag_value(backend.flags, "--max-num-seqs") or max(_DEFAULT_SEQUENCES, _most_running(backend)))
        place = _gain(backend, np.array([minute.waiting_for_a_place(places) for minute in backend.minutes]))
        if room is not None:
            findings.append(_for_room(model.name, backend, room))
        if place is not None:
            findings.append(_for_a_place(model.name, backend, places, place))
    return findings


def _gain(backend: BackendEvidence, waited: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Gain | None:
    requests = np.array([minute.requests for minute in backend.minutes])
    if not waited.any():
        return None
    drawn = np.random.default_rng(0).integers(len(requests), size=(_DRAWS, len(requests)))
    gain = gain_of(waited[drawn].sum(axis=1) / np.maximum(1, requests[drawn].sum(axis=1)), _OF)
    return gain if gain.is_worth_it else None


def _most_running(backend: BackendEvidence) -> int:
    """Return how many requests ran at most while others waited."""
    return max((running for minute in backend.minutes for running, _ in minute.others), default=0)


def _for_room(model: str, backend: BackendEvidence, gain: Gain) -> Finding:
    utilization = float(flag_value(backend.flags, "--gpu-memory-utilization") or _DEFAULT_UTILIZATION)
    set_to = ("--kv-cache-dtype", "fp8")
    if utilization < _MOST_UTILIZATION:
        set_to = ("--gpu-memory-utilization", f"{_MOST_UTILIZATION:g}")
    title = "its KV cache is too small: requests wait for room in it"
    evidence = f"{len(backend.minutes)} minutes of probes; the gain is at most this, if no request waits any more"
    change = flag_change(model, backend.name, backend.flags, *set_to)
    return Finding("memory", model, backend.name, title, gain, evidence, change)


def _for_a_place(model: str, backend: BackendEvidence, places: int, gain: Gain) -> Finding:
    title = f"requests wait for one of {places} places in its batch, although there is memory for more"
    full = _most_running(backend)
    evidence = f"{len(backend.minutes)} minutes of probes, in which up to {full} requests ran while others waited; "
    evidence += "the gain is at most this, where larger batches cost nothing"
    change = flag_change(model, backend.name, backend.flags, "--max-num-seqs", str(2 * places))
    return Finding("batch_limit", model, backend.name, title, gain, evidence, change)
