"""The room that reports how many replicas of each method keep a model's targets.

It ignores models without targets: for them, the fewest replicas would always do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from prometheus_client import Gauge

from backends import background
from gateway.dialects.errors import GatewayError
from gateway.gateway import Room
from gateway.rooms.fleet.demand import Minute
from gateway.rooms.fleet.model import Judged, ModelFleet
from gateway.telemetry.series import forget_series
from policies.build import learned_of

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from gateway.rooms.advice.finding import Finding

_MINUTE_S: Final = 60.0
_COLUMNS: Final = {
    "gateway_requests_total": "requests",
    "gateway_prompt_tokens_total": "prompt_tokens",
    "gateway_output_tokens_total": "output_tokens",
    "gateway_e2e_seconds_count": "finished",
    "gateway_e2e_seconds_sum": "finish_s",
}
"""Fields of a `Minute`, by series."""


class FleetRoom(Room):
    """Computes once a minute what is needed, from the counters of all workers."""

    order = 9

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        gauge = gateway.metrics.gauge
        self._saturation = gauge("gateway_pool_saturation")
        self._needed = gauge("gateway_replicas_needed")
        self._seconds = gauge("gateway_fleet_request_seconds")
        self.fleets: dict[str, ModelFleet] = {}
        self._next_s = math.inf  # until it is started

    def add_routes(self, app: FastAPI) -> None:
        """Add `/admin/fleet`, which KEDA's scaler `metrics-api` can read."""

        @app.get("/admin/fleet", tags=["admin"])
        async def fleet(model: str, method: str = "") -> dict[str, Any]:
            """Return the replicas that a model needs, of all methods or of one, and their cost in time."""
            if model not in self.gateway.models:
                raise GatewayError(404, f"There is no model {model}.", code="not_found")
            found = self.fleets.get(model) or ModelFleet()
            if found.missing:
                raise GatewayError(404, f"It is not known what {model} needs: {found.missing}.", code="not_found")
            counts, seconds, then_s = found.needed
            if method and method not in counts:
                known = ", ".join(counts)
                raise GatewayError(404, f"No {method} of {model} has been up; there are: {known}.", code="not_found")
            return {
                "needed": counts[method] if method else sum(counts.values()),
                "methods": counts,
                "saturation": _known(found.saturation),
                # Mean seconds to finish of the last hour's requests: as measured, and expected on the needed replicas.
                "seconds": {"up": _known(seconds), "needed": _known(then_s)},
                "advice": self.findings(model),
            }

    def findings(self, model: str) -> Sequence[Finding]:
        """Return the replicas that an operator should add or may remove, with the cost; empty if unknown."""
        fleet = self.fleets.get(model)
        if fleet is None or find_spec("gateway.rooms.advice") is None:
            return ()
        from gateway.rooms.advice.finding import Finding

        counts, seconds, then_s = fleet.advised
        changes = [
            f"{abs(more)} {method} {'more' if more > 0 else 'less'}"
            for method, count in sorted(counts.items())
            if (more := count - fleet.up[method])
        ]
        is_known = math.isfinite(then_s)
        if not changes or not (is_known or all(count >= fleet.up[method] for method, count in counts.items())):
            return ()
        total, hours = sum(counts.values()), len(fleet.minutes) / 60
        title = f"{total} replica{'' if total == 1 else 's'} keep {fleet.targets}: {', '.join(changes)}"
        worth = f"requests take {then_s:.2f} s in the mean in place of {seconds:.2f} s ({then_s / seconds - 1:+.0%})"
        worth = worth if is_known else "the present replicas are too few for the traffic"
        evidence = f"formulas on the step times learned, for the traffic of {hours:.1f} h; `gateway plan` simulates it"
        how = "# Begin those to add first; `gateway drain` those to take away, and stop them once they are idle."
        return (Finding("fleet", model, "", title, None, evidence, how, worth),)

    def start(self) -> None:
        """Start to count."""
        self._next_s = 0.0

    def tick(self) -> None:
        """Start the work of a new minute when it is due."""
        if time.monotonic() >= self._next_s and (self.running is None or self.running.done()):
            self._next_s = time.monotonic() + _MINUTE_S
            self.running = background.start("policies", self._work(), of="fleet")

    async def _work(self) -> None:
        totals, judged = await asyncio.to_thread(self._counted)
        self.fleets = {name: self.fleets.get(name) or ModelFleet() for name in self.gateway.models}
        for name, fleet in self.fleets.items():
            with background.guarded("policies", of=f"the fleet of {name}"):
                await self._count(name, fleet, totals.get(name, {}), judged.get(name, {}))

    async def _count(
        self, name: str, fleet: ModelFleet, totals: Mapping[str, float], judged: Mapping[str, Judged]
    ) -> None:
        """Add the last minute of a model, and compute what it needs, unless a reload removes it meanwhile."""
        if (model := self.gateway.models.get(name)) is None:
            return
        pages = {each.name: each.engine.metrics for each in self.gateway.pool.of(name)}
        engines = [page for page in pages.values() if page is not None]
        tokens = {each: None if page is None else page.generation_tokens for each, page in pages.items()}
        fleet.count(Minute(**totals, engine_tokens=fleet.engine_tokens(tokens)), judged)
        learned = learned_of(model.policy)
        if learned is None:
            fleet.forget("its policy learns no step times; `policy: {name: learned, slo: ...}` does")
        else:
            queries = sum(each.prefix_queries for each in engines)
            cached = sum(each.prefix_hits for each in engines) / queries if queries else 0.0
            up = [(each.declared.method.value, each) for each in self.gateway.pool.up(name)]
            await asyncio.to_thread(fleet.update, learned, up, cached)
        if name in self.gateway.models:
            self._show(name, fleet)

    def _show(self, name: str, fleet: ModelFleet) -> None:
        """Set the series; unknown ones become NaN, since workers' files cannot drop them."""
        shown: dict[Gauge, dict[tuple[str, ...], float]] = {
            self._saturation: {(name,): fleet.saturation},
            self._needed: {(name, method): count for method, count in fleet.needed.counts.items()},
            self._seconds: {(name, "up"): fleet.needed.seconds, (name, "needed"): fleet.needed.then_s},
        }
        for gauge, values in shown.items():
            gone = dict.fromkeys(forget_series(gauge, {"model": name}), math.nan)
            for labels, value in (gone | values).items():
                if labels in gone or not math.isnan(value):
                    gauge.labels(*labels).set(value)

    def _counted(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Judged]]]:
        """Return each model's totals since the start, and its requests judged by the targets, by method."""
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        judged: dict[str, dict[str, Judged]] = defaultdict(dict)
        for name, labels, value, *_ in self.gateway.metrics.samples():
            if (column := _COLUMNS.get(name)) is not None:
                totals[labels["model"]][column] += value
            elif name == "gateway_slo_requests_total" and labels["slo_class"] == "default":
                of_method, method, outcome = judged[labels["model"]], labels["method"], labels["outcome"]
                kept, missed = of_method.get(method, Judged(0.0, 0.0))
                of_method[method] = Judged(kept + value * (outcome == "kept"), missed + value * (outcome == "missed"))
        return totals, judged


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
