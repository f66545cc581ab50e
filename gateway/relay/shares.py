"""Fair shares of a model between clients, by what their requests cost."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

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


class Charge:
    """What a client was charged for a request that was sent."""

    def __init__(self, client: Client, price: Price) -> None:
        self.client = client
        self.price = price


class FairShares:
    """Who is served next: of those whose requests wait, the client that has been served least, as in VTC [1]_.

    What a client was served is the cost of its requests, over its weight: what is expected when one is sent, and in its
    place what it has cost when it has ended. Who comes after a pause has saved up nothing.

    References
    ----------
    .. [1] Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588.

    Examples
    --------
    >>> shares, one, two = FairShares(), Client("one"), Client("two", weight=2.0)
    >>> for _ in range(3):
    ...     charge = shares.charge(one, Price(0.1, 0.0, 0.0))
    >>> shares.begin(two)
    >>> round(shares.served_s("one"), 3), round(shares.served_s("two"), 3)
    (0.3, 0.2)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in_flight: Counter[str] = Counter()
        self._peaks: dict[str, tuple[float, float, float]] = {}  # by client: requests in flight at most, when, weight
        self._least_s = 0.0  # what the client that was served last had been served before
        self._served_s: dict[str, float] = {}

    def served_s(self, client: str) -> float:
        """Return what a client was served, in seconds of a weight of 1."""
        return self._served_s.get(client, 0.0)

    def begin(self, client: Client) -> None:
        """Have a client wait that had no request waiting."""
        self._served_s[client.name] = max(self.served_s(client.name), self._least_s)

    def has_room(self, client: Client, places: int) -> bool:
        """Return whether a client may have one more of the places in flight.

        Beyond its share of them it leaves as many free as others have needed of late, within their own shares: else who
        asks seldom would wait for the end of what others have begun.
        """
        others = {name: weight for name, (_, _, weight) in self._peaks.items() if name != client.name}
        others = {name: weight for name, weight in others.items() if self._peak(name) > _LEAST_PEAK}
        total = client.weight + sum(others.values())
        if not others or self._in_flight[client.name] < places * client.weight / total:
            return True
        kept = sum(
            max(0.0, min(places * weight / total, self._peak(name) + 1.0) - self._in_flight[name])
            for name, weight in others.items()
        )
        return self._in_flight.total() + kept < places

    def _peak(self, name: str) -> float:
        peak, at_s, _ = self._peaks.get(name, (0.0, 0.0, 1.0))
        return max(float(self._in_flight[name]), peak * math.exp((at_s - self._clock()) / _PEAK_S))

    def charge(self, client: Client, price: Price) -> Charge:
        """Charge a client what a request that is sent is expected to cost."""
        self._least_s = max(self._least_s, self.served_s(client.name))
        self._in_flight[client.name] += 1
        peak = max(self._peak(client.name), float(self._in_flight[client.name]))
        self._peaks[client.name] = peak, self._clock(), client.weight
        self._served_s[client.name] = self.served_s(client.name) + price.expected_s() / client.weight
        return Charge(client, price)

    def settle(self, charge: Charge, output_tokens: int) -> None:
        """Charge what a request has cost in place of what was expected."""
        price = charge.price
        self._in_flight[charge.client.name] -= 1
        self._served_s[charge.client.name] += (price.at_s(output_tokens) - price.expected_s()) / charge.client.weight


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
    return Price(_PROMPT_TOKEN_S * features.prompt_tokens, _OUTPUT_TOKEN_S, output_tokens)
