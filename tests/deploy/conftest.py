"""What tests of the Helm chart share."""

from __future__ import annotations

from collections.abc import Iterator

import helm_python as helm
import pytest

from tests.support.helm_chart import CHART


@pytest.fixture(scope="session")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded
