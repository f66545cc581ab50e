"""The health service, by which Kubernetes and data planes know whether to ask a picker."""

from __future__ import annotations

import pytest

from .requirement import Source, must, should
from .target import Target


@must(
    Source.HEALTH,
    "The health services liveness, readiness and envoy.service.ext_proc.v3.ExternalProcessor are SERVING.",
)
@pytest.mark.parametrize("service", ["liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
def test_serving(picker: Target, service: str) -> None:
    assert picker.check(service) == "SERVING"


@should(Source.EXT_PROC, "The health of an unknown service is NOT_FOUND.")
def test_unknown_service(picker: Target) -> None:
    assert picker.check("no.such.Service") in ("NOT_FOUND", "SERVICE_UNKNOWN")


@should(
    Source.EXT_PROC,
    "The health of the whole server, a service without a name, is SERVING: probes ask for it by default.",
)
def test_whole_server(picker: Target) -> None:
    assert picker.check("") == "SERVING"
