from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.conftest import Running, start_gateway


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with start_gateway() as started:
        yield started


@pytest.fixture
async def three() -> AsyncIterator[Running]:
    async with start_gateway(dict.fromkeys("abc", "baseline")) as started:
        yield started
