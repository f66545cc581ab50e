"""Fair shares of a model between clients, by what their requests cost."""

from __future__ import annotations

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

    def __init__(self) -> None:
        self._least_s = 0.0  # what the client that was served last had been served before
        self._served_s: dict[str, float] = {}

    def served_s(self, client: str) -> float:
        """Return what a client was served, in seconds of a weight of 1."""
        return self._served_s.get(client, 0.0)

    def begin(self, client: Client) -> None:
        """Have a client wait that had no request waiting."""
        self._served_s[client.name] = max(self.served_s(client.name), self._least_s)

    def charge(self, client: Client, price: Price) -> Charge:
        """Charge a client what a request that is sent is expected to cost."""
        self._least_s = max(self._least_s, self.served_s(client.name))
        self._served_s[client.name] = self.served_s(client.name) + price.expected_s() / client.weight
        return Charge(client, price)

    def settle(self, charge: Charge, output_tokens: int) -> None:
        """Charge what a request has cost in place of what was expected."""
        price = charge.price
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
