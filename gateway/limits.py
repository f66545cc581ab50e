"""How much each key may ask: requests and tokens per minute, requests at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.auth import Client
from gateway.openai import GatewayError


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds a minute's worth; it may go below zero, since a cost is known only afterwards."""

    per_minute: float
    level: float
    at_s: float

    def refill(self, now_s: float) -> None:
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / 60.0)
        self.at_s = now_s

    def wait_s(self, cost: float) -> float:
        """Return the seconds until `cost` can be taken; 0.0 if it can now."""
        return max(0.0, (cost - self.level) * 60.0 / self.per_minute)


@dataclass(slots=True)
class _Account:
    requests: _Bucket | None
    tokens: _Bucket | None
    in_flight: int = 0


class Limits:
    """Keeps each key within its limits. Tokens are charged when an answer ends, so they bound the next minute.

    Parameters
    ----------
    max_in_flight
        Requests under way at a time from all keys together; None for no bound.
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
        if client.max_in_flight is not None and account.in_flight >= client.max_in_flight:
            raise GatewayError(
                429,
                f"Key {client.name!r} may have {client.max_in_flight} requests under way: wait for one to end.",
                code="too_many_in_flight",
                retry_after_s=1.0,
            )
        now_s = self._clock()
        for bucket, cost, what in ((account.requests, 1.0, "requests"), (account.tokens, 1.0, "tokens")):
            if bucket is None:
                continue
            bucket.refill(now_s)
            wait_s = bucket.wait_s(cost)
            if wait_s > 0.0:
                raise GatewayError(
                    429,
                    f"Key {client.name!r} may use {bucket.per_minute:g} {what} a minute: try again in {wait_s:.0f} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        if account.requests is not None:
            account.requests.level -= 1.0
        account.in_flight += 1
        self._in_flight += 1

    def leave(self, client: Client, tokens: int) -> None:
        """Take note that a request has ended, and of the prompt and output tokens it cost."""
        account = self._account(client)
        account.in_flight -= 1
        self._in_flight -= 1
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
