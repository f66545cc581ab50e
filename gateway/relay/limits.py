"""Limits of each API key: requests and tokens per minute, and requests in flight, over all processes of a pool."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.dialects.errors import GatewayError
from gateway.routing.keys import ANONYMOUS, UNAUTHENTICATED, Client

QUIET_S: Final = 70.0
"""Seconds after which the use of a key is no longer reported: its buckets are full again."""

TOO_MANY: Final = "too_many_in_flight"

_ROUNDS: Final = 3
"""Exchanges until all peers certainly know what was used here: the current one, theirs, and a spare."""


_FOR_LINES: Final = 0.5
"""Share of each limit of a key for the lines of its batches; the rest is for its requests."""

_WITHOUT_KEY: Final = frozenset({ANONYMOUS.id, UNAUTHENTICATED.id})


@dataclass(slots=True)
class _Bucket:
    """A token bucket of one minute's budget; its level may go negative, since costs are known only afterwards."""

    per_minute: float
    level: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the level allows one more; 0.0 if it already does."""
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / 60.0)
        self.at_s = now_s
        return max(0.0, (1.0 - self.level) * 60.0 / self.per_minute)


class KeyUse(NamedTuple):
    """The use of a key at one process, as reported to its peers.

    A tuple, since it is sent between processes, and instances of compiled classes cannot be pickled.
    """

    # requests, tokens: sums since the process started.
    requests: int
    tokens: int
    # requests_before, tokens_before: these sums when it began to use the key, after over a minute without use, or when
    # the key got its first limit.
    requests_before: int
    tokens_before: int
    in_flight: int
    # requests_left, tokens_left: the rest of the limits per minute, as far as it knows; 0.0 without a limit.
    requests_left: float
    tokens_left: float

    def steady(self) -> tuple[int, int, int]:
        """Return the parts that time alone does not change."""
        return self.requests, self.tokens, self.in_flight


@dataclass(slots=True)
class _Account:
    """The use of a key: at this process, and as last reported by each peer."""

    requests: _Bucket | None
    tokens: _Bucket | None
    in_flight: int = 0
    sum_requests: int = 0
    sum_tokens: int = 0
    reported: KeyUse | None = None
    before: tuple[int, int] = (0, 0)  # see `KeyUse.requests_before`
    used_s: float = -math.inf
    peers: dict[str, KeyUse] = field(default_factory=dict)
    peers_in_flight: int = 0
    is_asked: bool = False  # whether it was used since the last report
    spent: int = 0  # admitted requests that peers may not know of
    spent_by_round: list[int] = field(default_factory=lambda: [0] * _ROUNDS)  # the last is the current round
    waiting: int = 0  # requests without a place, while peers may have released one
    told_in_flight: list[int] = field(default_factory=lambda: [0] * _ROUNDS)  # what peers may believe is in flight

    def begin(self) -> None:
        """Count a request that begins."""
        self.in_flight += 1
        self.sum_requests += 1
        if self.requests is not None:
            self.requests.level -= 1.0

    def end(self, tokens: int) -> None:
        """Count a request that ends, and charge its tokens."""
        self.in_flight -= 1
        self.sum_tokens += tokens
        if self.tokens is not None:
            self.tokens.level -= tokens

    def start_over(self) -> None:
        """Forget what peers reported and were told; report to them only what is used from now on."""
        self.before, self.reported, self.used_s = (self.sum_requests, self.sum_tokens), None, -math.inf
        self.peers, self.peers_in_flight = {}, 0
        self.spent, self.spent_by_round, self.told_in_flight = 0, [0] * _ROUNDS, [0] * _ROUNDS

    def report(self, now_s: float) -> KeyUse | None:
        """Return its use here for the peers; None if there was none in the last minute."""
        if self.is_asked or self.in_flight:
            if now_s - self.used_s > QUIET_S and self.reported is not None:
                self.before = self.reported.requests, self.reported.tokens
            self.used_s, self.is_asked = now_s, False
        if now_s - self.used_s > QUIET_S:
            return None
        self.reported = KeyUse(
            self.sum_requests,
            self.sum_tokens,
            *self.before,
            self.in_flight,
            0.0 if self.requests is None else round(self.requests.level, 2),
            0.0 if self.tokens is None else round(self.tokens.level, 2),
        )
        return self.reported

    def next_round(self) -> None:
        """Begin another exchange with the peers."""
        self.peers_in_flight = sum([use.in_flight for use in self.peers.values()])
        self.spent_by_round.append(0)
        self.spent -= self.spent_by_round.pop(0)
        self.told_in_flight.append(0 if self.reported is None else self.reported.in_flight)
        del self.told_in_flight[0]

    @property
    def grown(self) -> int:
        """Places taken here that peers may not know of."""
        return self.in_flight - min(self.told_in_flight)


class Limits:
    """Enforces the limits of each key. Tokens are charged when an answer ends, so they limit the next minute.

    Requests without a key have a limit of their own, and take no places of `max_in_flight`.

    The processes that serve a pool report their use of keys to each other some 20 times per second. Until the next
    report, each may admit an equal share of the remaining requests, and at least one. Together they admit no more than
    one process would, except for one request each.

    Examples
    --------
    >>> limits, client = Limits(clock=lambda: 0.0), Client("team", requests_per_minute=1)
    >>> limits.enter(client)
    >>> limits.leave(client, tokens=120)
    >>> limits.enter(client)
    Traceback (most recent call last):
    gateway.dialects.errors.GatewayError: Key 'team' is limited to 1 requests per minute: try again in 60 s.
    """

    def __init__(self, max_in_flight: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        # Limit of requests in flight in this process, over all keys; None for no limit.
        self._max_in_flight = max_in_flight
        self.in_flight = 0  # requests in flight in this process, over all keys
        self._clock = clock  # returns monotonic seconds
        self._accounts: dict[str, _Account] = {}  # by client id, as all below
        self._limited: dict[str, _Account] = {}  # those of keys with a limit
        self._reported_keys: dict[str, Set[str]] = {}  # in the last report of each peer
        self._share = 1.0  # this process's part of what is left, until the next exchange

    def enter(self, client: Client) -> None:
        """Admit a request, or raise. Each call that returns needs a later call of `leave`."""
        has_key = client is not UNAUTHENTICATED
        if has_key and self._max_in_flight is not None and self.in_flight >= self._max_in_flight:
            raise GatewayError(
                503,
                "The gateway is at its limit of requests in flight: try again shortly.",
                code="gateway_full",
                retry_after_s=1.0,
            )
        account = self._account(client)
        account.is_asked = True
        if client.max_in_flight is not None:
            left = client.max_in_flight - account.in_flight - account.peers_in_flight
            if left < 1 or (self._share < 1.0 and has_key and not _may_take(account.grown, left, self._share)):
                raise GatewayError(
                    429,
                    f"Key {client.name!r} is limited to {client.max_in_flight} requests in flight: "
                    "wait for one to end.",
                    code=TOO_MANY,
                    retry_after_s=1.0,
                )
        if account.requests is not None:
            self._check(client, account.requests, "requests", account.spent)
        if account.tokens is not None:
            self._check(client, account.tokens, "tokens", 0)
        self.in_flight += has_key
        if self._share < 1.0:
            account.spent += 1
            account.spent_by_round[-1] += 1
        account.begin()

    def wait(self, client: Client) -> bool:
        """Return whether a request without a place may wait for one: peers had them all, and may have released some.

        Each call that returns True needs a later call of `wait_no_longer`.
        """
        account, most = self._account(client), client.max_in_flight
        may_wait = self._share < 1.0 and most is not None and account.in_flight + account.waiting < most
        account.waiting += may_wait
        return may_wait

    def wait_no_longer(self, client: Client) -> None:
        """Stop counting a request as waiting for a place."""
        self._account(client).waiting -= 1

    def _check(self, client: Client, bucket: _Bucket, unit: str, spent: int) -> None:
        """Refuse a request until a bucket has room; `spent` is what was taken from it unknown to peers."""
        wait_s = bucket.wait_s(self._clock())
        if wait_s == 0.0 and not _may_take(spent, bucket.level, self._share):
            wait_s = 1.0
        if wait_s > 0.0:
            raise GatewayError(
                429,
                f"Key {client.name!r} is limited to {bucket.per_minute:g} {unit} per minute: "
                f"try again in {wait_s:.0f} s.",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def leave(self, client: Client, tokens: int) -> None:
        """Release a request that has ended, and charge its prompt and output tokens."""
        self._account(client).end(tokens)
        self.in_flight -= client is not UNAUTHENTICATED

    def enter_line(self, client: Client, ahead_tokens: float) -> bool:
        """Admit a batch line if enough of its key's limits is left; `ahead_tokens` is the cost of the lines in flight.

        Each call that returns True needs a later call of `leave_line`. The exchange itself takes the place among all
        requests of the gateway.
        """
        account, now_s = self._account(client), self._clock()
        in_flight, most = account.in_flight + account.peers_in_flight, client.max_in_flight
        if most is not None and in_flight >= _FOR_LINES * most:
            return False
        for bucket, ahead in ((account.requests, 0.0), (account.tokens, ahead_tokens)):
            if bucket is not None:
                wait_s = bucket.wait_s(now_s)
                if wait_s > 0.0 or bucket.level - ahead < _FOR_LINES * bucket.per_minute:
                    return False
        account.is_asked = True
        account.begin()
        return True

    def leave_line(self, client: Client, tokens: int) -> None:
        """Release a line, and charge its tokens."""
        self._account(client).end(tokens)

    def update(self, clients: Iterable[Client], max_in_flight: int | None) -> None:
        """Replace the limits but keep what has been used; forget removed keys without requests in flight."""
        self._max_in_flight = max_in_flight
        known = {client.id: client for client in clients}
        now_s = self._clock()
        for key, account in list(self._accounts.items()):
            client = known.get(key)
            if client is not None:
                account.requests = _changed(account.requests, client.requests_per_minute, now_s)
                account.tokens = _changed(account.tokens, client.tokens_per_minute, now_s)
                self._list(client, account)
            elif not account.in_flight + account.peers_in_flight + account.waiting and key not in _WITHOUT_KEY:
                del self._accounts[key]
                self._limited.pop(key, None)

    # Exchange with the peers: other processes that serve the same pool.

    def report(self) -> dict[str, KeyUse]:
        """Return the use of each key with a limit that was used in the last minute."""
        now_s = self._clock()
        reports = {key: account.report(now_s) for key, account in self._limited.items()}
        return {key: use for key, use in reports.items() if use is not None}

    def hear(self, peer: str, client: Client, use: KeyUse, *, is_new: bool) -> None:
        """Record the use of a key at a peer; call `divide` after all peers have been heard."""
        now_s = self._clock()
        account = self._account(client)
        before = account.peers.get(peer)
        requests = use.requests - max(use.requests_before, 0 if before is None else before.requests)
        tokens = use.tokens - max(use.tokens_before, 0 if before is None else before.tokens)
        _charge(account.requests, now_s, max(0, requests), use.requests_left if is_new else math.inf)
        _charge(account.tokens, now_s, max(0, tokens), use.tokens_left if is_new else math.inf)
        account.peers[peer] = use

    def no_longer_uses(self, peer: str, reported: Set[str]) -> None:
        """Drop the requests in flight of a peer for keys that it no longer reports."""
        for key in self._reported_keys.get(peer, frozenset()) - reported:
            if (account := self._limited.get(key)) is not None and (use := account.peers.get(peer)) is not None:
                account.peers[peer] = use._replace(in_flight=0)
        self._reported_keys[peer] = reported

    def forget(self, peer: str) -> None:
        """Drop what is known about a peer that has exited or is silent."""
        self._reported_keys.pop(peer, None)
        for account in self._limited.values():
            account.peers.pop(peer, None)

    def divide(self, peers: int) -> None:
        """Set this process's share until the next exchange; called after each exchange."""
        self._share = 1.0 / (1 + peers)
        for account in self._limited.values():
            account.next_round()

    def _account(self, client: Client) -> _Account:
        account = self._accounts.get(client.id)
        if account is None:
            now_s = self._clock()
            account = self._accounts[client.id] = _Account(
                _bucket(client.requests_per_minute, now_s),
                _bucket(client.tokens_per_minute, now_s),
            )
            self._list(client, account)
        return account

    def _list(self, client: Client, account: _Account) -> None:
        """Report an account to peers if and only if its key has a limit."""
        limits = (client.requests_per_minute, client.tokens_per_minute, client.max_in_flight)
        is_limited = client is not UNAUTHENTICATED and any(limit is not None for limit in limits)
        if is_limited is not (client.id in self._limited):
            account.start_over()
        if is_limited:
            self._limited[client.id] = account
        else:
            self._limited.pop(client.id, None)


def _may_take(taken: int, left: float, share: float) -> bool:
    """Return whether a process that has `taken` some may take one more: it may take its share, rounded up."""
    return taken < math.ceil(share * (left + taken))


def _changed(bucket: _Bucket | None, per_minute: float | None, now_s: float) -> _Bucket | None:
    """Return a bucket with a new limit, at the level of the old one."""
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now_s)
    bucket.wait_s(now_s)
    return _Bucket(per_minute, min(bucket.level, per_minute), now_s)


def _bucket(per_minute: float | None, now_s: float) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, per_minute, now_s)


def _charge(bucket: _Bucket | None, now_s: float, used: int, most: float) -> None:
    """Charge a bucket what a peer used; if `most` is finite, cap its level at that instead."""
    if bucket is None:
        return
    bucket.wait_s(now_s)
    bucket.level = bucket.level - used if math.isinf(most) else min(bucket.level, most)
