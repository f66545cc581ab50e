"""What an endpoint is asked beside the run."""

from __future__ import annotations

import pytest

from backends.validation import UsageError
from lab.live.endpoints import LiveEndpoint, engine_counters, inspect_endpoint
from tests.support.upstream import Upstream, Wire

LONG = b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n" + b" " * 3_000_000


async def test_answers_beyond_all_bounds_are_not_read() -> None:
    async def page(wire: Wire) -> None:
        await wire.send(LONG)

    async with Upstream("a", "m", models=LONG, metrics_behaviour=page) as server:
        endpoint = LiveEndpoint.of(server.url, None, None)
        with pytest.raises(UsageError, match="/v1/models is longer than 1048576 bytes"):
            await inspect_endpoint(endpoint, ["chat"], 0)
        assert await engine_counters(endpoint) is None
