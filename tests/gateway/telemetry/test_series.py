"""Values summed outside `prometheus_client` give the same page as values added one by one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from gateway.telemetry.registry import Registry
from gateway.telemetry.series import Count, Distribution, Family

disable_created_metrics()  # type: ignore[no-untyped-call]  # they hold times

BOUNDS = (0.1, 0.5, 2.0)
VALUES = (0.0, 0.1, 0.10001, 0.5, 1.0, 2.0, 2.5, 1000.0)


def declared(registry: CollectorRegistry) -> tuple[Counter, Histogram]:
    return (
        Counter("c", "text", ("a",), registry=registry),
        Histogram("d", "text", ("a",), buckets=BOUNDS, registry=registry),
    )


def test_what_is_summed_equals_what_is_added_value_by_value() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    (counter, histogram), (theirs_counted, theirs_observed) = declared(ours), declared(theirs)
    counts, distributions = Family(counter, Count), Family(histogram, Distribution)
    for number, value in enumerate(VALUES):
        counts.labels("x").inc(value)
        theirs_counted.labels("x").inc(value)
        distributions.labels("x").observe(value)
        theirs_observed.labels("x").observe(value)
        if number % 3 == 0:
            counts.flush()
            distributions.flush()
    for family in (counts, distributions, counts, distributions):
        family.flush()
    assert generate_latest(ours) == generate_latest(theirs)


def test_workers_show_nothing_of_models_that_are_gone() -> None:
    registry = Registry()
    for model in ("kept", "gone"):
        registry.gauge("gateway_pool_saturation").labels(model).set(2.0)
    registry._is_shared = True  # as if the values were in the files of workers
    registry.set_present([], ["kept"])
    assert [sample.labels["model"] for sample in registry.samples()] == ["kept"]
