"""Limits of each API key: requests and tokens per minute, and requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.http.errors import GatewayError
from gateway.routing.keys import ANONYMOUS, UNAUTHENTICATED, Client

_NAMES_WITHOUT_KEY = frozenset({ANONYMOUS.name, UNAUTHENTICATED.name})


@dataclass(slots=True)
class _Bucket:
    """A token bucket of one minute's budget; its level may be negative, since costs are known only afterwards."""

    per_minute: float
    level: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the level allows one more; 0.0 if it does now."""
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / 60.0)
        self.at_s = now_s
        return max(0.0, (1.0 - self.level) * 60.0 / self.per_minute)


class KeyUse(NamedTuple):
    """The use of a key at one worker: requests and tokens since the last report, and requests in flight.

    A tuple, since it is sent between processes and instances of compiled classes cannot be pickled.
    """

    requests: int
    tokens: int
    in_flight: int


@dataclass(slots=True)
class _Account:
    requests: _Bucket | None
    tokens: _Bucket | None
    in_flight: int = 0
    new_requests: int = 0
    new_tokens: int = 0
    reported_in_flight: int = 0
    elsewhere: dict[int, int] = field(default_factory=dict)  # requests in flight at each other worker

    def all_in_flight(self) -> int:
        return self.in_flight + sum(self.elsewhere.values())


class Limits:
    """Enforces the limits of each key. Tokens are charged when an answer ends, so they limit the next minute.

    Requests without a key have a limit of their own, and take no places of `max_in_flight`.

    Workers report the use of their keys to each other twice a second; a key can exceed its limit by what it sends in
    between.

    Parameters
    ----------
    max_in_flight
        Limit of requests in flight in this process, over all keys; None for no limit.
    clock
        Returns monotonic seconds.

    Examples
    --------
    >>> limits, client = Limits(clock=lambda: 0.0), Client("team", requests_per_minute=1)
    >>> limits.enter(client)
    >>> limits.leave(client, tokens=120)
    >>> limits.enter(client)
    Traceback (most recent call last):
    gateway.http.errors.GatewayError: Key 'team' is limited to 1 requests per minute: try again in 60 s.
    """

    def __init__(self, max_in_flight: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, client: Client) -> None:
        """Admit a request. Each call that returns must be followed by one of `leave`.

        Raises
        ------
        GatewayError
            429 with Retry-After if the key has reached one of its limits, 503 if the gateway is full.
        """
        has_key = client is not UNAUTHENTICATED
        if has_key and self._max_in_flight is not None and self._in_flight >= self._max_in_flight:
            raise GatewayError(
                503,
                f"The gateway is at its limit of {self._in_flight} requests in flight: try again shortly.",
                code="gateway_full",
                retry_after_s=1.0,
            )
        account = self._account(client)
        if client.max_in_flight is not None and account.all_in_flight() >= client.max_in_flight:
            raise GatewayError(
                429,
                f"Key {client.name!r} is limited to {client.max_in_flight} requests in flight: wait for one to end.",
                code="too_many_in_flight",
                retry_after_s=1.0,
            )
        now_s = self._clock()
        for bucket, unit in ((account.requests, "requests"), (account.tokens, "tokens")):
            if bucket is None:
                continue
            wait_s = bucket.wait_s(now_s)
            if wait_s > 0.0:
                raise GatewayError(
                    429,
                    f"Key {client.name!r} is limited to {bucket.per_minute:g} {unit} per minute: "
                    f"try again in {wait_s:.0f} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        account.in_flight += 1
        self._in_flight += has_key
        self._charge(account, requests=1, tokens=0)
        account.new_requests += 1

    def leave(self, client: Client, tokens: int) -> None:
        """Release a request that has ended, and charge its prompt and output tokens."""
        account = self._account(client)
        account.in_flight -= 1
        self._in_flight -= client is not UNAUTHENTICATED
        self._charge(account, requests=0, tokens=tokens)
        account.new_tokens += tokens

    def take_used(self) -> dict[str, KeyUse]:
        """Return what each key has used since the last call, for the other workers; omits unused keys."""
        used = {}
        for name, account in self._accounts.items():
            if account.new_requests or account.new_tokens or account.in_flight != account.reported_in_flight:
                used[name] = KeyUse(account.new_requests, account.new_tokens, account.in_flight)
                account.new_requests = account.new_tokens = 0
                account.reported_in_flight = account.in_flight
        return used

    def used_elsewhere(self, worker: int, client: Client, use: KeyUse) -> None:
        """Charge a key for what it used at another worker."""
        account = self._account(client)
        account.elsewhere[worker] = use.in_flight
        self._charge(account, use.requests, use.tokens)

    def worker_died(self, worker: int) -> None:
        """Drop the requests in flight of a worker that died."""
        for account in self._accounts.values():
            account.elsewhere.pop(worker, None)

    def update(self, clients: Iterable[Client], max_in_flight: int | None) -> None:
        """Replace the limits, keeping what has been used of them; keys without requests in flight that are gone end."""
        self._max_in_flight = max_in_flight
        known = {client.name: client for client in clients}
        now_s = self._clock()
        for name, account in list(self._accounts.items()):
            client = known.get(name)
            if client is not None:
                account.requests = _changed(account.requests, client.requests_per_minute, now_s)
                account.tokens = _changed(account.tokens, client.tokens_per_minute, now_s)
            elif not account.all_in_flight() and name not in _NAMES_WITHOUT_KEY:
                del self._accounts[name]

    def _charge(self, account: _Account, requests: int, tokens: int) -> None:
        if account.requests is not None:
            account.requests.level -= requests
        if account.tokens is not None:
            account.tokens.level -= tokens

    def _account(self, client: Client) -> _Account:
        account = self._accounts.get(client.name)
        if account is None:
            now_s = self._clock()
            account = self._accounts[client.name] = _Account(
                _bucket(client.requests_per_minute, now_s), _bucket(client.tokens_per_minute, now_s)
            )
        return account


def _changed(bucket: _Bucket | None, per_minute: float | None, now_s: float) -> _Bucket | None:
    """Return a bucket with another limit, at the level of the old one."""
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now_s)
    bucket.wait_s(now_s)
    return _Bucket(per_minute, min(bucket.level, per_minute), now_s)


def _bucket(per_minute: float | None, now_s: float) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, per_minute, now_s)
