"""docs/metrics.md lists exactly the series that the code registers."""

from __future__ import annotations

from backends.health import State
from gateway.routing.series import OUTCOMES, temperature_bucket
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/metrics.md").read_text().replace("*replica*", "model, backend, method")


def test_the_page_names_every_state_and_temperature_bucket() -> None:
    assert all(f"`{state}`" in PAGE for state in State)
    buckets = {temperature_bucket(hundredths / 100) for hundredths in range(201)}
    assert len(buckets) == 6
    assert all(f"`{bucket}`" in PAGE for bucket in buckets)


def test_the_page_names_every_outcome() -> None:
    assert all(f"`{outcome}`:" in PAGE for outcome in (*OUTCOMES, "refused"))
