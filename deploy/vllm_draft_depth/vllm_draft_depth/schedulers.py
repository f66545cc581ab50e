"""vLLM's two schedulers, with the drafts of each request cut to what it asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

logger = init_logger("vllm.draft_depth")  # below vLLM's own, so that it is written

KEY = "draft_tokens"


class Synchronous(Scheduler):
    """Cuts the drafts that the worker has made, before the next step is scheduled."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the drafts of the next step."""
        super().update_draft_token_ids(draft_token_ids)
        _cut(self.requests, draft_token_ids.req_ids)


class Asynchronous(AsyncScheduler):
    """Cuts the places kept for drafts that the worker is still making; it fills them from the first on."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        _cut(self.requests, scheduler_output.num_scheduled_tokens)


def _cut(requests: Mapping[str, Request], ids: Iterable[str]) -> None:
    """Shorten drafts, in lists of their own: vLLM shares one among requests."""
    for one in ids:
        request = requests.get(one)
        if request is not None and request.spec_token_ids:
            depth = _depth(request)
            if depth is not None:
                request.spec_token_ids = request.spec_token_ids[:depth]


def _depth(request: Request) -> int | None:
    """Return the depth that a request asks for; None if it asks for none that is known."""
    params = request.sampling_params
    if params is None or not params.extra_args or KEY not in params.extra_args:
        return None
    depth = params.extra_args[KEY]
    if type(depth) is int and depth >= 0:
        return depth
    logger.warning_once("A request's %s is no whole number from 0 on: its drafts are not cut", KEY)
    return None
