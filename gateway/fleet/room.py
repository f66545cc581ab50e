"""Fleet as a room of the gateway: it says how many replicas of which method the traffic needs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI

from backends import background
from backends.backend import Candidate
from gateway.dialects.errors import GatewayError
from gateway.fleet.capacity import Carrier, Targets, carrier, load_of
from gateway.fleet.correction import Correction
from gateway.fleet.demand import DAY_MINUTES, HOUR_MINUTES, SHORT_MINUTES, START_UP_MINUTES, Minute, forecast, present
from gateway.rooms import Room
from policies.build import learned_of
from policies.learned.belief import belief_of
from policies.learned.policy import Learned

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

_MINUTE_S: Final = 60.0
_SATURATION: Final = {
    "help": "Present traffic over what the replicas that are up carry within the targets; above 1 is too much",
    "labels": ["model"],
}
_NEEDED: Final = {
    "help": "Replicas that the traffic to expect needs to keep the targets, by method",
    "labels": ["model", "method"],
}
_COLUMNS: Final = {
    ("gateway_requests_total", None): ("requests",),
    ("gateway_prompt_tokens_total", None): ("prompt_tokens",),
    ("gateway_output_tokens_total", None): ("output_tokens",),
    ("gateway_slo_requests_total", "kept"): ("judged",),
    ("gateway_slo_requests_total", "missed"): ("judged", "missed"),
}
"""What counts for a minute, by series and, for those of requests that are judged by the model's targets, by outcome."""


class ModelFleet:
    """The traffic of a model, and the replicas that it needs."""

    def __init__(self, day_minutes: int = DAY_MINUTES, ahead_minutes: int = START_UP_MINUTES) -> None:
        self.day_minutes = day_minutes
        self.ahead_minutes = ahead_minutes  # until a replica is up
        self.minutes: deque[Minute] = deque(maxlen=day_minutes + HOUR_MINUTES)
        self.saturation = math.nan
        self.correction = Correction()
        self.needed: dict[str, int] = {}
        self._totals: Minute | None = None
        self._carriers: dict[str, Carrier] = {}  # also of methods that are no longer up

    def count(self, totals: Minute) -> None:
        """Add a minute, by what was counted since the start."""
        if self._totals is not None:
            pairs = zip(totals, self._totals, strict=True)
            self.minutes.append(Minute(*(max(0.0, now - before) for now, before in pairs)))
        self._totals = totals

    def update(self, learned: Learned, up: Sequence[tuple[str, Candidate]], cached: float) -> None:
        """Work out what is needed; may be called from another thread.

        Parameters
        ----------
        up
            The backends that are up, each with the name of its method.
        cached
            Share of the prompt tokens that prefix caches had.
        """
        models, minutes = learned.predictor.backend_models, list(self.minutes)
        batch = max(1.0, sum(each.in_flight + each.load.others for _, each in up) / max(1, len(up)))
        groups = belief_of(learned, [each for _, each in up], batch).groups
        for method, each in up:
            if (model := models.get(each.name)) is not None:
                found = carrier(model, groups, batch, each.load.kv_tokens)
                if found.per_step:
                    self._carriers[method] = found
        if not groups or not self._carriers or len(minutes) < SHORT_MINUTES:
            return
        self.correction.update(minutes[-1].judged, minutes[-1].missed, self.saturation)
        counts = Counter(method for method, _ in up)
        targets = Targets(*learned.settings.slo.seconds)
        world = groups, self._carriers, targets, cached, self.correction.factor
        self.needed = load_of(forecast(minutes, self.day_minutes, self.ahead_minutes), *world).needed(counts)
        self.saturation = load_of(present(minutes), *world).saturation(counts)


class FleetRoom(Room):
    """Works out once a minute what is needed, from what all workers count."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._saturation = gateway.metrics.gauge("gateway_pool_saturation", _SATURATION)
        self._needed = gateway.metrics.gauge("gateway_replicas_needed", _NEEDED)
        self.fleets: dict[str, ModelFleet] = {}
        self._next_s = math.inf  # until it is started
        self._working: asyncio.Task[None] | None = None

    def add_routes(self, app: FastAPI) -> None:
        """Add `/admin/fleet`, which KEDA's scaler `metrics-api` can read."""

        @app.get("/admin/fleet", tags=["admin"])
        async def fleet(model: str, method: str = "") -> dict[str, Any]:
            """Return the replicas that a model needs, of all methods or of one."""
            if (found := self.fleets.get(model)) is None or not found.needed:
                raise GatewayError(404, f"It is not known yet what {model} needs.", code="not_found")
            needed = found.needed.get(method, 0) if method else sum(found.needed.values())
            saturation = None if math.isnan(found.saturation) else found.saturation
            return {"needed": needed, "methods": found.needed, "saturation": saturation}

    def start(self) -> None:
        """Begin to count."""
        self._next_s = 0.0

    def tick(self) -> None:
        """Begin a new minute."""
        if time.monotonic() >= self._next_s and (self._working is None or self._working.done()):
            self._next_s = time.monotonic() + _MINUTE_S
            self._working = background.start("policies", self._work(), of="fleet")

    async def stop(self) -> None:
        """End it."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    async def _work(self) -> None:
        totals = await asyncio.to_thread(self._counted)
        self.fleets = {name: self.fleets.get(name) or ModelFleet() for name in self.gateway.models}
        for name, fleet in self.fleets.items():
            with background.guarded("policies", of=f"the fleet of {name}"):
                await self._count(name, fleet, totals.get(name, {}))

    async def _count(self, name: str, fleet: ModelFleet, totals: Mapping[str, float]) -> None:
        """Add the last minute of a model, and work out what it needs."""
        engines = [one for each in self.gateway.pool.of(name) if (one := self.gateway.pool.engine(each)) is not None]
        tokens = float(sum(each.generation_tokens for each in engines))
        fleet.count(Minute(**totals, engine_tokens=tokens))
        learned = learned_of(self.gateway.models[name].policy)
        if learned is None:
            return
        queries = sum(each.prefix_queries for each in engines)
        cached = sum(each.prefix_hits for each in engines) / queries if queries else 0.0
        up = [(each.said.method.value, each) for each in self.gateway.pool.up(name)]
        await asyncio.to_thread(fleet.update, learned, up, cached)
        if not math.isnan(fleet.saturation):
            self._saturation.labels(name).set(fleet.saturation)
        for method, needed in fleet.needed.items():
            self._needed.labels(name, method).set(needed)

    def _counted(self) -> dict[str, dict[str, float]]:
        totals: dict[str, dict[str, float]] = {}
        for sample in self.gateway.metrics.samples():
            labels = sample.labels
            outcome = labels.get("outcome") if labels.get("slo_class") == "default" else None
            for column in _COLUMNS.get((sample.name, outcome), ()):
                counted = totals.setdefault(labels["model"], defaultdict(float))
                counted[column] += sample.value
        return totals
