"""The room for latency objectives: it counts the requests that are served in time, by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.gateway import Room
from gateway.relay.accounting import against_objective
from gateway.relay.observers import EndedExchange, Follower, Observer
from gateway.routing.access import NO_ROUTING_HEADERS
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.router import NO_SLO
from gateway.telemetry.series import Count, Distribution, Family
from policies.build import learned_of

if TYPE_CHECKING:
    from gateway.gateway import Gateway


class SloRoom(Room):
    """Judges the requests that have an objective, of their own or from their key, class or model."""

    order = 10

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._requests = gateway.metrics.counter("gateway_slo_requests")
        self._ttft = gateway.metrics.histogram("gateway_slo_ttft_seconds")

    def follow(self) -> Mapping[str, Follower]:
        """Judge the requests of models that may have objectives by the settings."""
        settings, judges = self.gateway.settings, dict[str, Follower]()
        is_for_all = bool(settings.slo_classes) or any(key.slo or key.slo_class for key in settings.keys)
        for name, model in self.gateway.models.items():
            learned = learned_of(model.policy)
            slo = NO_SLO if learned is None else learned.settings.slo.seconds
            if is_for_all or slo != NO_SLO or (learned is not None and learned.settings.objective == "goodput"):
                judges[name] = _Judge(name, self._requests, self._ttft, slo)
        return judges


class _Judge(Observer):
    needs_answer = False

    def __init__(
        self,
        model: str,
        requests: Family[Count],
        ttft: Family[Distribution],
        slo: tuple[float | None, float | None],
    ) -> None:
        self._model, self._requests, self._ttft, self._slo = model, requests, ttft, slo

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        """Return itself if the request has an objective."""
        client, headers = routed.client, routed.headers
        if self._slo != NO_SLO or client.slo_class or client.slo_ttft_s is not None or client.slo_tpot_s is not None:
            return self
        return None if headers is NO_ROUTING_HEADERS or judged(routed) is None else self

    def on_end(self, ended: EndedExchange) -> None:
        """Count the request, unless its failure is the client's fault."""
        slo_class, outcome = judged(ended.routed), against_objective(ended, self._slo)
        slo_class = "default" if slo_class is None else slo_class  # judged by the objective of its model
        if outcome:
            method = "" if ended.upstream is None else ended.upstream.backend.declared.method.value
            self._requests.labels(self._model, slo_class, outcome, method).inc()
        if ended.stream is not None and ended.first_s:
            self._ttft.labels(self._model, slo_class).observe(ended.first_s - ended.arrived_s)


def judged(routed: RoutedRequest) -> str | None:
    """Return the class of a request; empty if its objective has no name, and None if it has none."""
    features, name = routed.features, routed.headers.slo_class or routed.client.slo_class
    return name or (None if features.slo_ttft_s is None and features.slo_tpot_s is None else "")
