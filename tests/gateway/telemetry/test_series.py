"""Values summed outside `prometheus_client` give the same page as values added one by one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from gateway.telemetry.series import Count, Distribution, Family

disable_created_metrics()  # type: ignore[no-untyped-call]  # they hold times

BOUNDS = (0.1, 0.5, 2.0)
VALUES = (0.0, 0.1, 0.10001, 0.5, 1.0, 2.0, 2.5, 1000.0)


def test_a_summed_histogram_equals_one_observed_value_by_value() -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    ours, theirs = (Histogram("d", "text", ("a",), buckets=BOUNDS, registry=registry) for registry in registries)
    distributions = Family(ours, Distribution)
    for number, value in enumerate(VALUES):
        distributions.labels("x").observe(value)
        theirs.labels("x").observe(value)
        if number % 3 == 0:
            distributions.flush()
    distributions.flush()
    distributions.flush()
    assert generate_latest(registries[0]) == generate_latest(registries[1])


def test_a_summed_counter_equals_one_incremented_each_time() -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    ours, theirs = (Counter("c", "text", ("a", "b"), registry=registry) for registry in registries)
    counts = Family(ours, Count)
    for amount in (1.0, 0.5, 7.0):
        counts.labels("x", "y").inc(amount)
        theirs.labels("x", "y").inc(amount)
        counts.flush()
    counts.labels("x", "z").inc()
    theirs.labels("x", "z").inc()
    counts.flush()
    for labels in ({"a": "x", "b": "y"}, {"a": "x", "b": "z"}):
        ours_now, theirs_now = (registry.get_sample_value("c_total", labels) for registry in registries)
        assert ours_now == theirs_now is not None
