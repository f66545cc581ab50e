"""How much each key may ask: requests and tokens per minute, requests at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.http.errors import GatewayError
from gateway.routing.keys import Client


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds a minute's worth; it may go below zero, since a cost is known only afterwards."""

    per_minute: float
    level: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until one more can be taken; 0.0 if it can now."""
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / 60.0)
        self.at_s = now_s
        return max(0.0, (1.0 - self.level) * 60.0 / self.per_minute)


class KeyUse(NamedTuple):
    """What a key used at one worker: requests and tokens since it last told, and requests under way there now.

    A tuple, since it goes from process to process: instances of a class that is compiled cannot be pickled.
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
    told_in_flight: int = 0
    elsewhere: dict[int, int] = field(default_factory=dict)  # requests under way at each other worker

    def all_in_flight(self) -> int:
        return self.in_flight + sum(self.elsewhere.values())


class Limits:
    """Keeps each key within its limits. Tokens are charged when an answer ends, so they bound the next minute.

    With several workers each tells the others what its keys used, twice a second: a key can be over its limit by
    what it sends within that time.

    Parameters
    ----------
    max_in_flight
        Requests under way at a time in this process from all keys together; None for no bound.
    clock
        Seconds that only ever grow.
    """

    def __init__(self, max_in_flight: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, client: Client) -> None:
        """Let a request in. Every call that returns is owed one `leave`.

        Raises
        ------
        GatewayError
            429 with Retry-After if the key is over a limit of its own, 503 if the gateway is full.
        """
        if self._max_in_flight is not None and self._in_flight >= self._max_in_flight:
            raise GatewayError(
                503,
                f"The gateway has {self._in_flight} requests under way, all it may hold: try again shortly.",
                code="gateway_full",
                retry_after_s=1.0,
            )
        account = self._account(client)
        if client.max_in_flight is not None and account.all_in_flight() >= client.max_in_flight:
            raise GatewayError(
                429,
                f"Key {client.name!r} may have {client.max_in_flight} requests under way: wait for one to end.",
                code="too_many_in_flight",
                retry_after_s=1.0,
            )
        now_s = self._clock()
        for bucket, what in ((account.requests, "requests"), (account.tokens, "tokens")):
            if bucket is None:
                continue
            wait_s = bucket.wait_s(now_s)
            if wait_s > 0.0:
                raise GatewayError(
                    429,
                    f"Key {client.name!r} may use {bucket.per_minute:g} {what} a minute: try again in {wait_s:.0f} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        account.in_flight += 1
        self._in_flight += 1
        self._charge(account, requests=1, tokens=0)
        account.new_requests += 1

    def leave(self, client: Client, tokens: int) -> None:
        """Take note that a request has ended, and of the prompt and output tokens it cost."""
        account = self._account(client)
        account.in_flight -= 1
        self._in_flight -= 1
        self._charge(account, requests=0, tokens=tokens)
        account.new_tokens += tokens

    def take_used(self) -> dict[str, KeyUse]:
        """Return what each key used since the last call, for the other workers; keys that did nothing are left out."""
        used = {}
        for name, account in self._accounts.items():
            if account.new_requests or account.new_tokens or account.in_flight != account.told_in_flight:
                used[name] = KeyUse(account.new_requests, account.new_tokens, account.in_flight)
                account.new_requests = account.new_tokens = 0
                account.told_in_flight = account.in_flight
        return used

    def used_elsewhere(self, worker: int, client: Client, use: KeyUse) -> None:
        """Take note of what a key used at another worker."""
        account = self._account(client)
        account.elsewhere[worker] = use.in_flight
        self._charge(account, use.requests, use.tokens)

    def worker_died(self, worker: int) -> None:
        """Forget what was under way at a worker that died."""
        for account in self._accounts.values():
            account.elsewhere.pop(worker, None)

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


def _bucket(per_minute: float | None, now_s: float) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, per_minute, now_s)
