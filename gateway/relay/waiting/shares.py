"""Fair shares of a model between clients, by what their requests cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from policies.roles import Price

_PEAK_S: Final = 20.0
_LEAST_PEAK: Final = 0.1
"""A client that has had one request counts for 46 s."""
_MOST_FADING: Final = 100.0
LONG_PROMPT_S: Final = 0.02
"""Seconds of a prompt, about a step, from which on it counts as one that holds up others."""
_ROUNDING: Final = 0.01
"""Of a backend: what clients need that have next to no weight, as the lines of a batch, takes none from others."""
_MOST_CLIENTS: Final = 1000
_MOST_TENANTS: Final = 100
"""Tenants have the names that requests give them, of 128 bytes at most: a client's take 64 KB."""


class Party:
    """A client, or a tenant of one: what it has here, what it needed of late, and what it was served."""

    def __init__(self, party_id: str, weight: float, shares: FairShares, parent: Party | None, served_s: float) -> None:
        self.id = party_id
        self.weight = weight
        self.shares = shares  # among which it is
        self.parent = parent  # the client of a tenant
        self.tenants: FairShares | None = None
        self.in_flight = self.waiting = 0  # requests
        self.cost_s = 0.0  # of what is in flight, as expected
        # peak, peak_cost_s: requests in flight at most, and their cost, less the longer ago: as of `FairShares.age`.
        self.peak = self.peak_cost_s = 0.0
        self.served_s = served_s  # by all processes, in seconds of a weight of 1
        self.total_s = 0.0  # by this process

    def tenant(self, name: str) -> Party:
        """Return a tenant; requests that name none are of one."""
        if self.tenants is None:
            self.tenants = FairShares(_MOST_TENANTS, self.shares.clock, self)
        return self.tenants.party(name)

    def wait(self) -> None:
        """Count a request that begins to wait."""
        for party in self._line():
            if not party.waiting:
                party.served_s = max(party.served_s, party.shares.least_s)
            party.waiting += 1

    def leave(self) -> None:
        """Count a request that waits no longer; who has nothing else here is forgotten."""
        for party in self._line():
            party.waiting -= 1
            party.shares.forget_idle(party)

    def charge(self, price: Price) -> Charge:
        """Charge what a request that is sent is expected to cost."""
        for party in self._line():
            party.shares.charge(party, price.expected_s())
        return Charge(self, price)

    def settle(self, price: Price, output_tokens: int) -> None:
        """Charge what a request has cost in place of what was expected."""
        for party in self._line():
            party.shares.settle(party, price.expected_s(), price.at_s(output_tokens))

    def has_room(self, places: float) -> bool:
        """Return whether it may have one more of the places in flight, and its client, if it is a tenant.

        Beyond its share of them it leaves as many free as others have needed of late, within their own shares: else who
        asks seldom would wait for the end of what others have begun.
        """
        if (client := self.parent) is not None:
            if not client.has_room(places):
                return False
            places = max(client.shares.share(client, places), client.in_flight + 1.0)
        return self.shares.has_room(self, places)

    def backends_for(self, price: Price, backends: int, per_backend: float) -> int:
        """Return on how many backends a request may hold up others by its prompt.

        All that runs beside a prompt waits for it, so that places alone keep nobody from being held up. Who has more
        than its share in flight, by what that costs, leaves the backends to others that they have needed.
        """
        if self.parent is not None:
            backends = self.parent.backends_for(price, backends, per_backend)
        return self.shares.backends_for(self, price.expected_s(), backends, per_backend) if backends > 1 else backends

    def _line(self) -> tuple[Party, ...]:
        """Return it, and its client before it."""
        return (self,) if self.parent is None else (self.parent, self)


class Charge(NamedTuple):
    """What a client, or a tenant of it, was charged for a request that was sent."""

    party: Party
    price: Price


class _Needed(NamedTuple):
    """What parties have needed of late, each within its share."""

    places: float
    kept: float  # of these, the ones that they do not take
    cost_s: float


class FairShares:
    """Who is served next: of those whose requests wait, the client that has been served least, as in VTC [1]_.

    What a client was served is the cost of its requests, over its weight: what is expected when one is sent, and in its
    place what it has cost when it has ended. Who comes after a pause has saved up nothing. The tenants of a client
    share what is its, alike: each client with tenants has shares of its own for them.

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
        self._most = most  # parties that are known at once
        self.clock = clock
        self._of = of  # the client whose tenants these are
        self._parties: dict[str, Party] = {}  # who was served last comes last
        self._in_flight = 0  # requests of all
        self._weights = 0.0  # of those that have needed anything of late
        self.least_s = 0.0  # what the party that was served last had been served before
        self._aged_s = clock()
        self._needed: dict[float, _Needed] = {}  # by the share of a weight of 1; empty once anything has changed
        self._heard_s: dict[str, Mapping[str, float]] = {}  # what other processes have served each

    @property
    def totals_s(self) -> dict[str, float]:
        """What this process has served each party."""
        return {party.id: party.total_s for party in self._parties.values()}

    def party(self, party_id: str, weight: float = 1.0) -> Party:
        """Return a party with its present weight.

        One that comes anew has been served as much as who was served last. Beyond the most that are known, all that
        come are one, of an empty id, while none of the others is idle.
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
        """Return a party's share of the places, beside those that have needed any of late."""
        own = 0.0 if party.peak > _LEAST_PEAK else party.weight
        return places * party.weight / (self._weights + own)

    def has_room(self, party: Party, places: float) -> bool:
        """Return whether a party may have one more of the places."""
        own = self.share(party, places)
        if own == places or party.in_flight < own:
            return True
        return self._in_flight + self._need(own / party.weight).kept < places

    def backends_for(self, party: Party, cost_s: float, backends: int, per_backend: float) -> int:
        """Return on how many backends a party may hold up others by a prompt."""
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
        """Charge a party for a request that is sent."""
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
        """Charge a party what a request has cost."""
        self._in_flight -= 1
        party.in_flight -= 1
        party.cost_s = max(0.0, party.cost_s - expected_s)
        self._add(party, cost_s - expected_s)

    def age(self) -> None:
        """Decay the recent demand of each party, and drop those without requests; called about once a second."""
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
        """Add what another process has served the clients since it was heard before."""
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
        """Return how much is left of what was needed when parties were aged."""
        return math.exp(max(-_MOST_FADING, (self._aged_s - self.clock()) / _PEAK_S))

    def _need(self, share: float) -> _Needed:
        """Return what all have needed of late, where the share of a weight of 1 is so many places.

        Who has more than its share in flight keeps nothing for itself, so that `kept` is what it has to leave.
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
        """Forget a party that has nothing in flight, nothing waiting, no need of late, and no debt."""
        is_here = party.in_flight or party.waiting or party.peak > _LEAST_PEAK
        if not is_here and party.served_s <= self.least_s:
            self._parties.pop(party.id, None)

    def _forget_one(self) -> bool:
        """Forget who was served longest ago, of those without a request here; return whether there is one."""
        for party in self._parties.values():
            if not party.in_flight and not party.waiting:
                del self._parties[party.id]
                if party.peak > _LEAST_PEAK:
                    self._weights -= party.weight
                    self._needed.clear()
                return True
        return False


def _peak(party: Party, left: float) -> tuple[float, float]:
    """Return the requests that a party has had in flight of late at most, and their cost."""
    return max(float(party.in_flight), left * party.peak), max(party.cost_s, left * party.peak_cost_s)
