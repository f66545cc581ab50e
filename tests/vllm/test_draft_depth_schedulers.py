"""The schedulers of deploy/vllm_draft_depth: both kinds by steps, and the asynchronous one with a real worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.vllm

PLUG_IN = ROOT / "deploy/vllm_draft_depth"
K = 4
ASKED = [None, 0, 1, 3, -1, "2", 7, True]
MOST = [K, 0, 1, 3, K, K, K, K]

IMPORTS = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(PLUG_IN)!r}]
import vllm_draft_depth
from tests.vllm.scheduling import drive
"""
FORCED_ASYNC = IMPORTS + "from tests.vllm.forced_async import drafted\nanswer = drafted(*given)"
DRIVE = IMPORTS + "asked, options = given\nanswer = drive(vllm_draft_depth.Scheduler, asked, **options)"
DRIVE_OWN = IMPORTS + (
    "from vllm.v1.core.sched.scheduler import Scheduler\n"
    "from vllm.v1.core.sched.async_scheduler import AsyncScheduler\n"
    "asked, options = given\n"
    "answer = drive(AsyncScheduler if options['asynchronous'] else Scheduler, asked, **options)"
)
REFUSED = IMPORTS + (
    "from types import SimpleNamespace\n"
    "import vllm\n"
    "version, model, speculation = given\n"
    "was = vllm.__version__, vllm.__version_tuple__\n"
    "vllm.__version__ = '.'.join(map(str, version))\n"
    "vllm.__version_tuple__ = tuple(version)\n"
    "config = SimpleNamespace(\n"
    "    model_config=SimpleNamespace(**{'is_diffusion': False, 'has_inner_state': False, **model}),\n"
    "    speculative_config=speculation and SimpleNamespace(**speculation),\n"
    ")\n"
    "try:\n"
    "    vllm_draft_depth.Scheduler(vllm_config=config)\n"
    "except ValueError as error:\n"
    "    answer = str(error)\n"
    "finally:\n"
    "    vllm.__version__, vllm.__version_tuple__ = was\n"
)

InVllm = Callable[..., Any]
OPTIONS = [
    {"asynchronous": asynchronous, "runner": runner, "blocks": blocks, "seed": seed}
    for asynchronous in (False, True)
    for runner in (1, 2)
    for blocks, seed in ((1000, 0), (14, 1))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_request_gets_its_depth_and_its_answer(in_vllm: InVllm, options: dict[str, Any]) -> None:
    driven = in_vllm(DRIVE, [ASKED, options])
    assert driven["kind"] == ("AsyncScheduler" if options["asynchronous"] else "Scheduler")
    assert [max(depths) for depths in driven["depths"]] == MOST
    assert all(driven["right"])
    assert driven["usage"] == 0.0
    assert (driven["preemptions"] > 0) == (options["blocks"] == 14)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_without_a_depth_it_is_vllms_own_scheduler(in_vllm: InVllm, options: dict[str, Any]) -> None:
    asked = [None] * len(ASKED)
    assert in_vllm(DRIVE, [asked, options]) | {"kind": ""} == in_vllm(DRIVE_OWN, [asked, options]) | {"kind": ""}


@pytest.mark.parametrize(
    ("version", "model", "speculation", "why"),
    [
        ((0, 31, 2), {}, None, "this is vLLM 0.31.2, and it knows 0.32 and 0.33"),
        ((0, 34, 0), {}, None, "this is vLLM 0.34.0, and it knows 0.32 and 0.33"),
        ((0, 32, 0), {"is_diffusion": True}, None, "a diffusion model has no drafts to cut"),
        ((0, 32, 0), {"has_inner_state": True}, None, "models that keep a state beside the KV cache"),
        ((0, 33, 0), {}, {"enable_adaptive_verification": True}, "with enable_adaptive_verification the engine itself"),
    ],
)
def test_what_it_does_not_know_it_refuses_at_start(
    in_vllm: InVllm, version: tuple[int, ...], model: dict[str, Any], speculation: dict[str, Any] | None, why: str
) -> None:
    assert why in in_vllm(REFUSED, [version, model, speculation])


def test_a_real_engine_that_schedules_asynchronously_drafts_as_asked(in_vllm: InVllm) -> None:
    depths = [None, 0, 1, 2, 3]
    config = {"method": "eagle", "model": ".cache/tiny-models/eagle", "num_speculative_tokens": 3}
    report = in_vllm(FORCED_ASYNC, [config, depths])
    assert (report["scheduler"], report["worker_is_async"]) == ("Asynchronous", True)
    assert report["most_in_a_step"] == len(depths)
    assert [max(drafts) for drafts in report["drafts"]] == [3, 0, 1, 2, 3]
    assert all(tokens == report["tokens"][0] for tokens in report["tokens"])
    # Deeper drafts, fewer steps; one token a step without any, and one step more for the prompt and one under way.
    steps = [len(drafts) for drafts in report["drafts"]]
    assert 100 <= steps[1] <= 102
    assert steps[0] == steps[4] < steps[3] < steps[2] < steps[1]
