"""Shadow drafting as a room of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from backends import background
from gateway.gateway import Room
from gateway.relay.observers import Follower
from gateway.rooms.shadow.replay import ShadowDrafting
from gateway.routing.model import Model
from policies.learned.shadow_drafting import shadow_arms

if TYPE_CHECKING:
    from gateway.gateway import Gateway


class ShadowRoom(Room):
    """Replays drafting for each model whose policy and pool use it."""

    order = 2
    work = ("shadow drafting",)

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self.drafting: dict[str, ShadowDrafting] = {}  # by model
        self._is_started = False

    def follow(self) -> Mapping[str, Follower]:
        """Start for models that now need it, and stop for those that no longer do."""
        before = self.drafting
        found = {name: self._drafting(model, before.get(name)) for name, model in self.gateway.models.items()}
        self.drafting = {name: drafting for name, drafting in found.items() if drafting is not None}
        for drafting in self.drafting.values():
            if self._is_started and drafting not in before.values():
                drafting.start()
        for drafting in before.values():
            if drafting not in self.drafting.values():
                background.start("shadow drafting", asyncio.to_thread(drafting.stop))
        return self.drafting

    def start(self) -> None:
        """Start the threads and their processes, which load in the background."""
        self._is_started = True
        for drafting in self.drafting.values():
            drafting.start()

    async def stop(self) -> None:
        """Stop the threads and their processes."""
        for drafting in self.drafting.values():
            await asyncio.to_thread(drafting.stop)

    def tick(self) -> None:
        """Pass results to the policies."""
        for name, drafting in self.drafting.items():
            drafting.deliver(self.gateway.models[name].observe_shadow)

    def _drafting(self, model: Model, before: ShadowDrafting | None) -> ShadowDrafting | None:
        learner, backends = model.learner, [upstream.backend for upstream in model.upstreams.values()]
        shadow = None if learner is None else learner.shadow
        arms = shadow_arms((each.method, each.num_speculative_tokens, each.speculative_config) for each in backends)
        if learner is None or shadow is None or shadow.sample == 0 or not arms or len(backends) < 2:
            return None
        if before is not None and before.replays(learner, arms):
            return before
        return ShadowDrafting(learner, shadow, arms)
