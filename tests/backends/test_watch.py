"""What a replica's probes say of its engine, and what stays of it when another engine answers."""

from __future__ import annotations

from dataclasses import fields

import pytest

from backends import watch
from backends.backend import Backend, EngineChange
from backends.background import Seldom
from backends.drafter_limit import DrafterLimit
from backends.engine import Said
from backends.engine_metrics import EngineMetrics
from backends.health import HealthRules
from backends.probe import Probe, ProbeResult
from backends.speculation import Method
from backends.watch import Watch

OWN = {"health", "in_flight", "weight", "read_s", "answered_tokens", "answered_steps"}
"""What is not of the engine."""


def watched() -> Watch:
    limit = DrafterLimit(2048)
    backend = Backend("a", "m", Method.EAGLE3, "http://h", 3, drafter_limit=limit, asks_version=True)
    return Watch(backend, Probe(backend, 1.0), HealthRules())


def said(tokens: int, version: str = "0.32.0") -> Said:
    return Said({"id": "m", "max_model_len": tokens}, tokens, ("m",), version=version)


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (EngineMetrics(wake_ups=1), EngineMetrics(wake_ups=2, generation_tokens=5), [EngineChange.WAKE_UP]),
        (EngineMetrics(awake=0), EngineMetrics(awake=1), [EngineChange.WAKE_UP]),
        (EngineMetrics(awake=None), EngineMetrics(awake=1), []),
        (EngineMetrics(awake=1), EngineMetrics(awake=0), []),
        (EngineMetrics(), EngineMetrics(reloads=1), [EngineChange.RELOAD]),
    ],
)
def test_what_an_engine_goes_through_is_seen(
    before: EngineMetrics, now: EngineMetrics, changes: list[EngineChange]
) -> None:
    watch = watched()
    assert watch.take(ProbeResult(said=said(8192), is_new=True, engine=before), 1.0) == []
    assert watch.take(ProbeResult(said=said(8192), engine=now), 2.0) == changes


def test_nothing_of_an_engine_stays_when_it_restarts() -> None:
    """A new field of `Backend` or `Engine` that is not of this process fails here, unless it goes with the engine."""
    watch, fresh = watched(), watched()
    silent = EngineMetrics(running=3, generation_tokens=9000, later_steps=9000, speculates=False, started_s=1.0)
    for number in range(40):
        watch.take(ProbeResult(said=said(1024, "0.19.0"), is_new=number == 0, engine=silent), float(number))
    watch.backend.engine.habits = object()
    assert watch.backend.engine.contradictions
    assert watch.backend.engine.occupancy.minutes
    new = ProbeResult(said=said(32768), is_new=True, engine=EngineMetrics(speculates=True, started_s=2.0))
    changes = watch.take(new, 99.0)
    assert changes == [EngineChange.RESTART, EngineChange.SPECULATION]
    fresh.take(new, 99.0)
    for field in fields(Backend):
        if field.name not in OWN | {"engine"}:
            assert getattr(watch.backend, field.name) == getattr(fresh.backend, field.name), field.name
    one, other = watch.backend.engine, fresh.backend.engine
    assert (one.said, one.metrics, one.habits) == (other.said, other.metrics, None)
    assert vars(one.occupancy) == vars(other.occupancy)
    assert vars(one.comparison) == vars(other.comparison)


def test_an_engine_that_has_no_metrics_any_more_has_no_load_of_the_one_before() -> None:
    watch = watched()
    page = EngineMetrics(running=3, speculates=False)
    watch.take(ProbeResult(said=said(1024), is_new=True, engine=page), 1.0)
    watch.take(ProbeResult(said=said(1024), is_new=True), 2.0)
    backend = watch.backend
    assert (backend.load.running, backend.engine.contradictions, backend.method) == (0, {}, Method.EAGLE3)
    assert not watch.is_at_work


async def test_a_late_process_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def late(self: Watch, *, admit: bool) -> tuple[ProbeResult, float]:
        return ProbeResult("late", late=admit), 2.0

    monkeypatch.setattr(Watch, "_probe_timed", late)
    monkeypatch.setattr(watch, "_late", Seldom())
    assert (await watched().probe_now(admit=True)).late
    assert [record.message[:33] for record in caplog.records] == ["this process was late by 2.0 s: p"]
