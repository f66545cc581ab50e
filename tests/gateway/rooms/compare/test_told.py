"""What operators are told while a comparison runs."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from tests.gateway.conftest import MODEL, Running
from tests.gateway.rooms.compare.support import begin, comparisons, found, narrowing, room_of, stop, teach, with_state
from tests.support.waiting import eventually_async


async def _printed(gateway: Running, *words: str) -> str:
    result = await gateway.command(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_its_blocks_and_that_it_may_send_requests_elsewhere_are_said(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        assert "a comparison runs" not in await _printed(gateway, "explain", "hi")
        asked = ("--a", "baseline", "--b", "eagle3", "--for", "1d")
        assert "Comparing for 1d at most, in blocks of 85 s." in await _printed(gateway, "compare", "start", *asked)
        await gateway.until(lambda: narrowing(gateway))
        assert "a comparison runs, which may send it elsewhere" in await _printed(gateway, "explain", "hi")


async def test_an_arm_without_a_replica_that_is_up_is_named(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        await begin(gateway)
        for name in ("b0", "b1"):
            assert "is up" not in (await found(gateway))["sentence"]
            assert (await gateway.command("drain", name)).exit_code == 0
        assert (await found(gateway))["sentence"].endswith("No replica of eagle3 is up.")


async def test_a_ratio_of_what_is_no_longer_the_better_arm_is_no_number(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:

        async def ratio(better: str, other: str) -> float:
            return await gateway.counted("gateway_compare_ratio", better=better, other=other)

        async def is_known() -> bool:
            return 0.0 < await ratio("eagle3", "baseline") < 1.0

        async def is_gone() -> bool:
            return math.isnan(await ratio("eagle3", "baseline"))

        teach(await begin(gateway), baseline=0.01, eagle3=0.008)
        await eventually_async(is_known)
        await gateway.until(lambda: not narrowing(gateway))
        await begin(gateway, a="a0", b="a1")
        await eventually_async(is_gone)


async def test_a_comparison_that_runs_is_no_change_to_make(tmp_path: Path) -> None:
    async with with_state(tmp_path) as gateway:
        await begin(gateway)
        advised = await _printed(gateway, "advise")
        assert f"{MODEL}: nothing to advise." in advised
        assert "baseline and eagle3 are being compared: Nothing is known: " in advised


async def test_the_log_tells_a_comparison_that_begins_from_one_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.rooms.compare.room")
    said = "m: the comparison of baseline and eagle3 "

    def stages() -> list[str]:
        stages = [each.removeprefix(said) for each in caplog.messages if each.startswith(said)]
        caplog.clear()
        return stages

    async with with_state(tmp_path) as gateway:
        await begin(gateway)
        assert stages() == ["begins"]
        (present,) = comparisons(gateway)
        await room_of(gateway)._put_first(MODEL, present.definition.with_longer_blocks(20.0, 0))
        assert stages() == ["goes on"]
    async with with_state(tmp_path) as gateway:
        assert stages() == ["goes on"]
        await stop(gateway)
        assert stages() == ["has ended: stopped"]
        await begin(gateway)
        assert stages() == ["begins"]
