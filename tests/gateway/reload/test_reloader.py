"""The reloader goes on and answers, whatever a reload raises."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config.pool_file import PoolFile
from gateway.config.settings import PoolSettings
from gateway.reload import reloader
from gateway.reload.reloader import Cause, Outcome, Reloader, ReloadError
from tests.support.waiting import eventually


def settings(temperature: float = 1.0) -> PoolSettings:
    backends = {"a": {"method": "baseline", "url": "http://10.0.0.1:8000"}}
    model = {"policy": {"name": "round_robin"}, "default_temperature": temperature, "backends": backends}
    return PoolFile.model_validate({"models": {"m": model}})


@pytest.mark.parametrize("breaks", ["load", "apply"])
async def test_it_goes_on_after_a_reload_that_raises(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloader, "_PAUSE_S", 0.01)
    ends: list[tuple[Cause, Outcome]] = []
    failing = True

    def load() -> PoolSettings:
        if failing and breaks == "load":
            raise RecursionError
        return settings(temperature=0.5)

    async def apply(settings: PoolSettings) -> None:
        if failing and breaks == "apply":
            raise ZeroDivisionError

    reloads = Reloader(load, settings(), apply, lambda *end: ends.append(end), ())
    running = asyncio.create_task(reloads.run())
    reloads.request("signal")
    await eventually(lambda: ends == [("signal", "failed")])
    with pytest.raises(ReloadError) as refused:
        await reloads.reload("admin")
    assert refused.value.outcome == "failed"
    failing = False
    reloads.request("signal")
    await eventually(lambda: ends[-1] == ("signal", "changed"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_dry_run_ends_no_trial() -> None:
    def drafting(k: int) -> PoolSettings:
        drafts = {"method": "suffix", "speculative_config": {"num_speculative_tokens": k}}
        model = {"default_temperature": 1.0, "backends": {"a": {**drafts, "serve": {"model": "org/m"}}}}
        return PoolFile.model_validate({"models": {"m": model}})

    async def apply(settings: PoolSettings) -> None:
        pass

    file = [drafting(4)]
    reloads = Reloader(lambda: file[0], drafting(4), apply, lambda *end: None, ())
    trial = "m", "a", {"method": "suffix", "num_speculative_tokens": 24}
    assert len(await reloads.reload("admin", trial=trial)) == 1
    file[0] = drafting(8)
    assert len(await reloads.reload("admin", dry_run=True)) == 1
    file[0] = drafting(4)  # the edit is taken back
    assert await reloads.reload("admin") == []
