"""Fair shares of a model between clients, by the cost of their requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from policies.roles import Price

_PEAK_S: Final = 20.0
_LEAST_PEAK: Final = 0.1
"""Demand that counts: a client that has had one request counts for 46 s."""
_MOST_FADING: Final = 100.0
LONG_PROMPT_S: Final = 0.02
"""Prefill seconds, about one step, from which a prompt counts as delaying others."""
_ROUNDING: Final = 0.01
"""In backends: clients of nearly no weight, such as batch lines, do not cost others a backend."""
_MOST_CLIENTS: Final = 1000
_MOST_TENANTS: Final = 100
"""Requests name their tenants, in at most 128 bytes: those of a client take 64 KB."""


class Party:
    """A client, or a tenant of one: what it has here, its recent demand, and what it was served."""

    def __init__(self, party_id: str, weight: float, shares: FairShares, parent: Party | None, served_s: float) -> None:
        self.id = party_id
        self.weight = weight
        self.shares = shares  # of which it is part
        self.parent = parent  # the client of a tenant
        self.tenants: FairShares | None = None
        self.in_flight = self.waiting = 0  # requests
        self.cost_s = 0.0  # expected cost of its requests in flight
        # peak, peak_cost_s: most requests in flight, and their cost, decayed with time: as of `FairShares.age`.
        self.peak = self.peak_cost_s = 0.0
        self.served_s = served_s  # by all processes, in seconds per unit of weight
        self.total_s = 0.0  # by this process

    def tenant(self, name: str) -> Party:
        """Return a tenant; all requests that name none share one."""
        if self.tenants is None:
            self.tenants = FairShares(_MOST_TENANTS, self.shares.clock, self)
        return self.tenants.party(name)

    def wait(self) -> None:
        """Count a request that starts to wait."""
        for party in self._line():
            if not party.waiting:
                party.served_s = max(party.served_s, party.shares.least_s)
            party.waiting += 1

    def leave(self) -> None:
        """Count a request that stops waiting; forget a party that has nothing else here."""
        for party in self._line():
            party.waiting -= 1
            party.shares.forget_idle(party)

    def charge(self, price: Price) -> Charge:
        """Charge the expected cost of a request being sent."""
        for party in self._line():
            party.shares.charge(party, price.expected_s())
        return Charge(self, price)

    def settle(self, price: Price, output_tokens: int) -> None:
        """Replace the expected cost of a request by its actual cost."""
        for party in self._line():
            party.shares.settle(party, price.expected_s(), price.at_s(output_tokens))

    def has_room(self, places: float) -> bool:
        """Return whether it may take one more of the places in flight, and if it is a tenant, its client too.

        Beyond its share, it leaves free what others have needed recently, within their own shares: else a client that
        asks rarely would wait for requests of others to end.
        """
        if (client := self.parent) is not None:
            if not client.has_room(places):
                return False
            places = max(client.shares.share(client, places), client.in_flight + 1.0)
        return self.shares.has_room(self, places)

    def backends_for(self, price: Price, backends: int, per_backend: float) -> int:
        """Return on how many backends a request's prompt may delay others.

        Everything in its batch waits for a prompt, so places alone protect nobody. A party with more than its share of
        the cost in flight leaves others the backends that they have needed.
        """
        if self.parent is not None:
            backends = self.parent.backends_for(price, backends, per_backend)
        return self.shares.backends_for(self, price.expected_s(), backends, per_backend) if backends > 1 else backends

    def _line(self) -> tuple[Party, ...]:
        """Return its client, if it is a tenant, and itself."""
        return (self,) if self.parent is None else (self.parent, self)


class Charge(NamedTuple):
    """What a client or tenant was charged for a request that was sent."""

    party: Party
    price: Price


class _Needed(NamedTuple):
    """The recent demand of all parties, each within its share."""

    places: float
    kept: float  # of these, the places that they do not use now
    cost_s: float


class FairShares:
    """Decides who is served next: of the clients whose requests wait, the one served least, as in VTC [1]_.

    A client is charged the cost of its requests over its weight: the expected cost when one is sent, replaced by the
    actual cost at its end. A pause saves up nothing. The tenants of a client share its part equally: each client with
    tenants has shares of its own for them.

    References
    ----------
    .. [1] Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588.

    Examples
    --------
    >>> shares = FairShares()
    >>> one = shares.party("one")
    >>> for _ in range(3):
    ...     charge = one.charge(Price(0.1, 0.0, 0.0, 0.1))
    >>> two = shares.party("two", weight=2.0)
    >>> round(one.served_s, 3), round(two.served_s, 3)
    (0.3, 0.2)
    """

    def __init__(
        self,
        most: int = _MOST_CLIENTS,
        clock: Callable[[], float] = time.perf_counter,
        of: Party | None = None,
    ) -> None:
        self._most = most  # parties known at once
        self.clock = clock
        self._of = of  # the client whose tenants these are
        self._parties: dict[str, Party] = {}  # in the order in which they were last served
        self._in_flight = 0  # requests of all parties
        self._weights = 0.0  # total weight of parties with recent demand
        self.least_s = 0.0  # what the last party served had been served before
        self._aged_s = clock()
        self._needed: dict[float, _Needed] = {}  # cache, by the share of a weight of 1; cleared on any change
        self._heard_s: dict[str, Mapping[str, float]] = {}  # what other processes have served, by party

    @property
    def totals_s(self) -> dict[str, float]:
        """What this process has served each party."""
        return {party.id: party.total_s for party in self._parties.values()}

    def party(self, party_id: str, weight: float = 1.0) -> Party:
        """Return a party, with its weight updated.

        A new one starts with as much as the last party served. While the most parties are known and none is idle, all
        new ones share one with an empty id.
        """
        party = self._parties.get(party_id)
        if party is None:
            if len(self._parties) >= self._most and not self._forget_one() and party_id:
                return self.party("")
            party = self._parties[party_id] = Party(party_id, weight, self, self._of, self.least_s)
        elif party.weight != weight:
            if party.peak > _LEAST_PEAK:
                self._weights += weight - party.weight
            party.weight = weight
            self._needed.clear()
        return party

    def share(self, party: Party, places: float) -> float:
        """Return a party's share of the places, next to parties with recent demand."""
        own = 0.0 if party.peak > _LEAST_PEAK else party.weight
        return places * party.weight / (self._weights + own)

    def has_room(self, party: Party, places: float) -> bool:
        """Return whether a party may have one more of the places."""
        own = self.share(party, places)
        if own == places or party.in_flight < own:
            return True
        return self._in_flight + self._need(own / party.weight).kept < places

    def backends_for(self, party: Party, cost_s: float, backends: int, per_backend: float) -> int:
        """Return on how many backends a party's prompt may delay others."""
        places = backends * per_backend
        own = self.share(party, places)
        needed, _, others_s = self._need(own / party.weight)
        peak, own_s = _peak(party, self._left())
        if party.peak > _LEAST_PEAK:
            needed, others_s = needed - min(own, peak + 1.0), others_s - own_s
        if max(cost_s, own_s) * (places - own) > others_s * own:
            return max(1, int(backends - needed / per_backend + _ROUNDING))
        return backends

    def charge(self, party: Party, cost_s: float) -> None:
        """Charge a party the expected cost of a request being sent."""
        self.least_s = max(self.least_s, party.served_s)
        self._in_flight += 1
        party.in_flight += 1
        party.cost_s += cost_s
        if party.peak <= _LEAST_PEAK:
            self._weights += party.weight
        left = self._left()
        party.peak = max(party.peak, party.in_flight / left)
        party.peak_cost_s = max(party.peak_cost_s, party.cost_s / left)
        self._add(party, cost_s)
        self._parties.pop(party.id, None)
        self._parties[party.id] = party

    def settle(self, party: Party, expected_s: float, cost_s: float) -> None:
        """Charge a party the actual cost of a request."""
        self._in_flight -= 1
        party.in_flight -= 1
        party.cost_s = max(0.0, party.cost_s - expected_s)
        self._add(party, cost_s - expected_s)

    def age(self) -> None:
        """Decay the recent demand of each party, and drop idle ones; called about twice a second."""
        left = self._left()
        self._aged_s, self._weights = self.clock(), 0.0
        self._needed.clear()
        for party in [*self._parties.values()]:
            party.peak, party.peak_cost_s = _peak(party, left)
            if party.peak > _LEAST_PEAK:
                self._weights += party.weight
            else:
                self.forget_idle(party)
            if party.tenants is not None:
                party.tenants.age()

    def hear(self, process: str, totals_s: Mapping[str, float]) -> None:
        """Add what another process has served the clients since its previous report."""
        before = self._heard_s.get(process, totals_s)
        self._heard_s[process] = totals_s
        for party_id, total_s in totals_s.items():
            if served_s := total_s - before.get(party_id, 0.0):
                party = self._parties.get(party_id) or self.party(party_id)
                party.served_s += served_s

    def forget(self, process: str) -> None:
        """Drop what was heard of a process that is gone."""
        self._heard_s.pop(process, None)

    def _left(self) -> float:
        """Return the decay of demand since `age` last ran."""
        return math.exp(max(-_MOST_FADING, (self._aged_s - self.clock()) / _PEAK_S))

    def _need(self, share: float) -> _Needed:
        """Return the recent demand of all parties, if a weight of 1 has a share of `share` places.

        A party with more than its share in flight keeps nothing for itself, so `kept` is what it must leave to others.
        """
        needed = self._needed.get(share)
        if needed is None:
            places, kept, cost_s, left = 0.0, 0.0, 0.0, self._left()
            for party in self._parties.values():
                if party.peak > _LEAST_PEAK:
                    peak, peak_cost_s = _peak(party, left)
                    need = min(share * party.weight, peak + 1.0)
                    places += need
                    kept += max(0.0, need - party.in_flight)
                    cost_s += peak_cost_s
            needed = self._needed[share] = _Needed(places, kept, cost_s)
        return needed

    def _add(self, party: Party, cost_s: float) -> None:
        seconds = cost_s / party.weight
        party.served_s += seconds
        party.total_s += seconds
        self._needed.clear()

    def forget_idle(self, party: Party) -> None:
        """Forget a party without requests in flight or waiting, recent demand, or debt."""
        is_here = party.in_flight or party.waiting or party.peak > _LEAST_PEAK
        if not is_here and party.served_s <= self.least_s:
            self._parties.pop(party.id, None)

    def _forget_one(self) -> bool:
        """Forget the party served longest ago that has no request here; return whether there was one."""
        for party in self._parties.values():
            if not party.in_flight and not party.waiting:
                del self._parties[party.id]
                if party.peak > _LEAST_PEAK:
                    self._weights -= party.weight
                    self._needed.clear()
                return True
        return False


def _peak(party: Party, left: float) -> tuple[float, float]:
    """Return the most requests that a party recently had in flight, and their cost."""
    return max(float(party.in_flight), left * party.peak), max(party.cost_s, left * party.peak_cost_s)
