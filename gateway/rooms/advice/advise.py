"""All rules of advice: simple ones are here, those that weigh speculation have a file each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Final

import numpy as np
import yaml
from pydantic import BaseModel, TypeAdapter

from backends.launch.vllm_command import flag_value
from backends.speculation import Method
from gateway.rooms.advice.draft_length import draft_length
from gateway.rooms.advice.evidence import BackendEvidence, Contradiction, ModelEvidence
from gateway.rooms.advice.experiment import experiment
from gateway.rooms.advice.finding import LEAST_GAIN, MIN_ANSWERS, Finding, Gain, flag_change, gain_of, lines
from gateway.rooms.advice.losing_method import losing_method
from policies.trouble.troubles import TroubleFinding

_MIN_MINUTES: Final = 10
_BOOTSTRAPS: Final = 400
_MOST_UTILIZATION: Final = 0.95
_DEFAULT_UTILIZATION: Final = 0.92
_DEFAULT_SEQUENCES: Final = 256
"""Smallest default batch size of vLLM; engines that the gateway did not start do not report theirs."""
_TIME_IN_ENGINE: Final = "time that requests spend in the engine"
SPECULATION: Final = frozenset({"draft_length", "losing_method"})
"""Rules on how replicas speculate; a model gets one finding from all of them."""


def pool_file(model: ModelEvidence) -> list[Finding]:
    """Return the backends whose engines contradict the pool file, with what it should say."""
    findings = []
    for backend in model.backends:
        if (found := backend.contradiction) is not None:
            change, worth = _correction(model, backend, found), "a pool file that says what runs"
            where = model.name, backend.name
            findings.append(Finding("pool_file", *where, found.text, None, found.counters, change, worth))
    return findings


def _correction(model: ModelEvidence, backend: BackendEvidence, found: Contradiction) -> str:
    method, k = found.observed.method, found.observed.schedule.k
    if method is Method.BASELINE:
        change = f"method: baseline # {backend.method}; or start the engine with --speculative-config"
        return lines(model.name, backend.name, change)
    changes = ["speculative_config:", f"  num_speculative_tokens: {k}" + (f" # {backend.k}" if backend.k else "")]
    if method is not backend.method:
        changes.insert(0, f"method: ... # {backend.method}; see the engine's --speculative-config")
    return lines(model.name, backend.name, *changes)


class Known(BaseModel):
    """A known trouble."""

    methods: frozenset[str]
    shapes: frozenset[str]
    problem: str
    where: str
    what: str


@cache
def known_troubles() -> tuple[Known, ...]:
    """Return the known troubles of engines that break on some requests."""
    text = files("gateway.rooms.advice").joinpath("known_troubles.yaml").read_text("utf-8")
    return TypeAdapter(tuple[Known, ...]).validate_python(yaml.safe_load(text))


def trouble(model: ModelEvidence) -> list[Finding]:
    """Return the troubles found, each with the thread about it if one is known."""
    findings = []
    for each in model.troubles:
        evidence = f"{each.bad:.0f} of {each.tries:.0f}, each after {each.lost_s:.1f} s; elsewhere fewer do"
        findings.append(Finding("trouble", model.name, each.place, str(each), None, evidence, _upgrade(each)))
    return findings


def _upgrade(found: TroubleFinding) -> str:
    method = found.arm.partition(":")[0]
    for known in known_troubles():
        if method in known.methods and known.problem == found.problem and not known.shapes.isdisjoint(found.shape):
            return f"# Upgrade the engine; such requests go elsewhere meanwhile.\n# {known.where}\n# {known.what}"
    return "# Upgrade the engine, or report it to vLLM with such a request; they go elsewhere meanwhile."


def drafter_limit(model: ModelEvidence) -> list[Finding]:
    """Return the drafter limits that part of the model's requests exceeds, wherever they were sent."""
    total, findings = sum(each.contexts.get(math.inf, 0.0) for each in model.backends), []
    for limit in {each.limit: None for each in model.backends if each.limit is not None}:
        limited = [each for each in model.backends if each.limit == limit]
        longer = sum(beyond(each.contexts, limit.tokens) for each in model.backends)
        here = sum(beyond(each.contexts, limit.tokens) for each in limited)
        if longer < LEAST_GAIN * total or total < MIN_ANSWERS:
            continue
        change = ["speculative_config:", "  model: ... # a draft that serves longer contexts"]
        if all(each.limit is not None for each in model.backends):
            change += ["# or a replica beside it that drafts at any length, such as", "# method: suffix"]
        title = f"{longer / total:.0%} of the model's requests exceed the drafter's {limit.tokens:,} tokens"
        evidence = f"{longer:,.0f} of {total:,.0f} requests, of which {here:,.0f} were sent here: {limit.consequence}"
        names, text = ", ".join(each.name for each in limited), lines(model.name, limited[0].name, *change)
        worth = "drafts for longer requests"
        findings.append(Finding("drafter_limit", model.name, names, title, None, evidence, text, worth))
    return findings


def beyond(contexts: Mapping[float, float], tokens: int) -> float:
    """Return how many of the contexts, counted up to each bound, are longer; assume log-uniform lengths between bounds.

    Examples
    --------
    >>> beyond({1024: 10, 2048: 60, 8192: 80, math.inf: 100}, 2048), beyond({2048: 0, 8192: 50, math.inf: 50}, 4096)
    (40.0, 25.0)
    """
    bounds = sorted(contexts)[:-1]
    if not bounds:
        return 0.0
    upto = np.interp(math.log2(tokens), np.log2(bounds), [contexts[bound] for bound in bounds])
    return contexts[math.inf] - float(upto)


def waiting(model: ModelEvidence) -> list[Finding]:
    """Return the backends whose requests wait for memory, and those whose batch is limited although memory is free.

    By Little's law, the share of an engine's requests that wait is the share of their time that they wait. The interval
    is a bootstrap over minutes.
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
    drawn = np.random.default_rng(0).integers(len(requests), size=(_BOOTSTRAPS, len(requests)))
    gain = gain_of(waited[drawn].sum(axis=1) / np.maximum(1, requests[drawn].sum(axis=1)), _TIME_IN_ENGINE)
    return gain if gain.is_worth_it else None


def _most_running(backend: BackendEvidence) -> int:
    """Return the most requests that ran while others waited."""
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


def advise(model: ModelEvidence) -> list[Finding]:
    """Return what to change, the largest gain first.

    It advises to change how one replica at a time speculates, the one that saves the pool most: after that, the others
    get different traffic. A backend that contradicts the pool file is left out of all else: nobody knows what its
    figures describe.
    """
    contradicted = pool_file(model)
    model = replace(model, backends=tuple(backend for backend in model.backends if backend.contradiction is None))
    findings = [*drafter_limit(model), *draft_length(model), *losing_method(model), *waiting(model)]
    answers = {backend.name: backend.steps.answers for backend in model.backends if backend.steps is not None}
    total = sum(answers.values())

    def worth(finding: Finding) -> float:
        """Return the share of the total answer time that a change saves."""
        share = 0.0 if finding.gain is None else finding.gain.share
        return share * answers[finding.backend] / total

    best = max((finding for finding in findings if finding.rule in SPECULATION), key=worth, default=None)
    kept = [finding for finding in findings if finding.rule not in SPECULATION or finding is best]
    kept.sort(key=lambda finding: -(finding.gain.share if finding.gain else 0.0))
    # If no change of how replicas speculate is certain to help, an experiment may be worth it.
    return [*contradicted, *trouble(model), *kept, *(experiment(model) if best is None else [])]
