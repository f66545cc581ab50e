"""Fair shares of a model between clients, by what their requests cost."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.backend import State
from gateway.routing.keys import Client
from policies.roles import Price, Pricing

if TYPE_CHECKING:
    from gateway.routing.router import RoutedRequest

_PROMPT_TOKEN_S: Final = 2e-5
_OUTPUT_TOKEN_S: Final = 4e-4
_OUTPUT_TOKENS: Final = 256.0
"""What is assumed under a policy that predicts nothing: those of an 8B model on an H100 in a batch of 16."""


_PEAK_S: Final = 20.0
_LEAST_PEAK: Final = 0.1
"""A client that has had one request counts for 46 s."""
LONG_PROMPT_S: Final = 0.02
"""Seconds of a prompt, about a step, from which on it counts as one that holds up others."""
_ROUNDING: Final = 0.01
"""Of a backend: what clients need that have next to no weight, as the lines of a batch, takes none from others."""
_MOST_CLIENTS: Final = 1000
"""Tenants have the names that requests give them."""


class Charge:
    """What a client, or a tenant of it, was charged for a request that was sent."""

    def __init__(self, client: Client, price: Price, tenant: Charge | None = None) -> None:
        self.client = client
        self.price = price
        self.tenant = tenant


class _Peak(NamedTuple):
    """What a client had in flight at most, less the longer ago."""

    requests: float
    cost_s: float  # as expected
    weight: float  # of the client
    at_s: float


class FairShares:
    """Who is served next: of those whose requests wait, the client that has been served least, as in VTC [1]_.

    What a client was served is the cost of its requests, over its weight: what is expected when one is sent, and in its
    place what it has cost when it has ended. Who comes after a pause has saved up nothing. The tenants of a client
    share what is its, alike.

    References
    ----------
    .. [1] Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588.

    Examples
    --------
    >>> shares = FairShares()
    >>> one, two = Client("one", id="one"), Client("two", id="two", weight=2.0)
    >>> for _ in range(3):
    ...     charge = shares.charge(one, "", Price(0.1, 0.0, 0.0, 0.1))
    >>> shares.begin(two)
    >>> round(shares.served_s("one"), 3), round(shares.served_s("two"), 3)
    (0.3, 0.2)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in_flight: Counter[str] = Counter()
        self._cost_s: dict[str, float] = {}  # of what is in flight, as expected
        self._peaks: dict[str, _Peak] = {}  # by client; who was served last comes last
        self._least_s = 0.0  # what the client that was served last had been served before
        self._served_s: dict[str, float] = {}
        self.totals_s: dict[str, float] = {}  # what this process has served each client
        self._heard_s: dict[str, Mapping[str, float]] = {}  # the same of others
        self._tenants: dict[str, FairShares] = {}

    def served_s(self, client: str) -> float:
        """Return what a client was served, in seconds of a weight of 1."""
        return self._served_s.get(client, 0.0)

    def tenants(self, client: str) -> FairShares:
        """Return the shares of the tenants of a client."""
        if client not in self._tenants:
            self._tenants[client] = FairShares(self._clock)
        return self._tenants[client]

    def begin(self, client: Client) -> None:
        """Have a client wait that had no request waiting."""
        self._served_s[client.id] = max(self.served_s(client.id), self._least_s)

    def has_room(self, client: Client, tenant: str, places: float) -> bool:
        """Return whether a client, and its tenant, may have one more of the places in flight.

        Beyond its share of them it leaves as many free as others have needed of late, within their own shares: else who
        asks seldom would wait for the end of what others have begun.
        """
        own, needed = self._needed(client, places)
        count = self._in_flight[client.id]
        if needed and count >= own:
            kept = sum(max(0.0, need - self._in_flight[name]) for name, need in needed.items())
            if self._in_flight.total() + kept >= places:
                return False
        return not tenant or self.tenants(client.id).has_room(Client(tenant, id=tenant), "", max(own, count + 1.0))

    def backends_for(self, client: Client, tenant: str, price: Price, backends: int, per_backend: float) -> int:
        """Return on how many backends a request may hold up others by its prompt.

        All that runs beside a prompt waits for it, so that places alone keep nobody from being held up. A client that
        has more than its share in flight, by what that costs, leaves the backends to others that they have needed.
        """
        own, needed = self._needed(client, backends * per_backend)
        own_s = max(price.expected_s(), self._peak(client.id).cost_s)
        others_s = sum(self._peak(name).cost_s for name in needed)
        if own_s * (backends * per_backend - own) > others_s * own:
            backends = max(1, int(backends - sum(needed.values()) / per_backend + _ROUNDING))
        if tenant and backends > 1:
            return self.tenants(client.id).backends_for(Client(tenant, id=tenant), "", price, backends, per_backend)
        return backends

    def _needed(self, client: Client, places: float) -> tuple[float, dict[str, float]]:
        """Return a client's share of the places, and of the places what others have needed of late within theirs."""
        peaks = {name: self._peak(name) for name in self._peaks if name != client.id}
        others = {name: peak for name, peak in peaks.items() if peak.requests > _LEAST_PEAK}
        share = places / (client.weight + sum(peak.weight for peak in others.values()))
        needed = {name: min(share * peak.weight, peak.requests + 1.0) for name, peak in others.items()}
        return share * client.weight, needed

    def _peak(self, name: str) -> _Peak:
        """Return the most that a client has had in flight of late."""
        peak = self._peaks.get(name, _Peak(0.0, 0.0, 1.0, 0.0))
        left = math.exp((peak.at_s - self._clock()) / _PEAK_S)
        requests = max(float(self._in_flight[name]), left * peak.requests)
        return _Peak(requests, max(self._cost_s.get(name, 0.0), left * peak.cost_s), peak.weight, self._clock())

    def charge(self, client: Client, tenant: str, price: Price) -> Charge:
        """Charge a client what a request that is sent is expected to cost; and the tenant, if it has a name."""
        name = client.id
        self._least_s = max(self._least_s, self.served_s(name))
        self._in_flight[name] += 1
        self._cost_s[name] = self._cost_s.get(name, 0.0) + price.expected_s()
        peak = self._peak(name)
        self._peaks.pop(name, None)
        self._peaks[name] = peak._replace(weight=client.weight)
        self._add(name, price.expected_s() / client.weight)
        if len(self._peaks) > _MOST_CLIENTS:
            self._forget_one()
        return Charge(
            client, price, self.tenants(name).charge(Client(tenant, id=tenant), "", price) if tenant else None
        )

    def settle(self, charge: Charge, output_tokens: int) -> None:
        """Charge what a request has cost in place of what was expected."""
        name, price = charge.client.id, charge.price
        self._in_flight[name] -= 1
        self._cost_s[name] = max(0.0, self._cost_s.get(name, 0.0) - price.expected_s())
        self._add(name, (price.at_s(output_tokens) - price.expected_s()) / charge.client.weight)
        if charge.tenant is not None:
            self.tenants(name).settle(charge.tenant, output_tokens)

    def hear(self, process: str, totals_s: Mapping[str, float]) -> None:
        """Add what another process has served the clients since it was heard before."""
        before = self._heard_s.get(process, totals_s)
        self._heard_s[process] = totals_s
        for name, total_s in totals_s.items():
            self._served_s[name] = self.served_s(name) + total_s - before.get(name, 0.0)

    def forget(self, process: str) -> None:
        """Drop what was heard of a process that is gone."""
        self._heard_s.pop(process, None)

    def _add(self, name: str, seconds: float) -> None:
        self._served_s[name] = self.served_s(name) + seconds
        self.totals_s[name] = self.totals_s.get(name, 0.0) + seconds

    def _forget_one(self) -> None:
        """Forget who was served longest ago, of those without a request in flight."""
        idle = next((name for name in self._peaks if not self._in_flight[name]), None)
        if idle is not None:
            for known in (self._peaks, self._in_flight, self._cost_s, self._served_s, self.totals_s):
                known.pop(idle, None)


def price_of(routed: RoutedRequest) -> Price:
    """Return what the policy expects a request to cost on the best of the backends that are up, or an assumption."""
    model, features = routed.model, routed.features
    if isinstance(model.policy, Pricing):
        try:
            backends = [each.backend for each in model.upstreams.values()]
            return model.policy.price(features, [each for each in backends if each.state is State.UP] or backends)
        except Exception as error:  # noqa: BLE001
            model.fallback.note(model.policy.name, "price", error)
    output_tokens = min(features.max_tokens or _OUTPUT_TOKENS, _OUTPUT_TOKENS) * features.n
    prompt_s = _PROMPT_TOKEN_S * features.prompt_tokens
    return Price(prompt_s, _OUTPUT_TOKEN_S, output_tokens, prompt_s)
