"""What operators are told while a comparison runs."""

from __future__ import annotations

import math
from pathlib import Path

from tests.gateway.conftest import start_gateway
from tests.gateway.rooms.compare.support import METHODS, narrowing, start, teach
from tests.support.waiting import eventually_async


async def test_a_ratio_of_what_is_no_longer_the_better_arm_is_no_number(tmp_path: Path) -> None:
    async with start_gateway(METHODS, state={"file": str(tmp_path / "state.sqlite")}) as gateway:

        async def ratio(better: str, other: str) -> float:
            return await gateway.counted("gateway_compare_ratio", better=better, other=other)

        async def is_known() -> bool:
            return 0.0 < await ratio("eagle3", "baseline") < 1.0

        async def is_gone() -> bool:
            return math.isnan(await ratio("eagle3", "baseline"))

        assert (await start(gateway)).status_code == 200
        teach(gateway, baseline=0.01, eagle3=0.008)
        await eventually_async(is_known)
        await gateway.until(lambda: not narrowing(gateway))
        assert (await start(gateway, a="a0", b="a1")).status_code == 200
        await eventually_async(is_gone)
