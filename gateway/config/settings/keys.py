"""The sections `keys` and `admin`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import (
    Field,
    StringConstraints,
)

from backends.validation import Issue
from gateway.config.settings.base import Count, Milliseconds, Name, Secret, Settings, none_if_empty


class SloSettings(Settings):
    """Latency objective of a key's requests, for those that do not set their own by headers.

    Parameters
    ----------
    ttft_ms
        Time to first token, in milliseconds.
    tpot_ms
        Time per output token after the first, in milliseconds.
    """

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if the objective is empty."""
        if not data:
            yield Issue((), "has neither ttft_ms nor tpot_ms", "set one of them, or remove slo")


class KeySettings(Settings):
    """An API key of a client, with its permissions and limits.

    Parameters
    ----------
    name
        Name of the key in logs and metrics.
    key
        The key itself; alternatively give its `sha256`.
    sha256
        SHA-256 of the key, in hexadecimal.
    models
        Models that the key may use, by name; aliases are included. Null allows all.
    may_override
        Whether its requests may choose their backend (`x-gateway-backend`, `x-gateway-method`).
    requests_per_minute
        Limit on requests per minute; null sets none.
    tokens_per_minute
        Limit on prompt and output tokens per minute; null sets none.
    max_in_flight
        Limit on requests in flight at once; null sets none.
    slo
        Latency objective for policies with the objective `goodput`; headers of a request take precedence.

    Examples
    --------
    >>> key = KeySettings(name="batch", key="sk-1", requests_per_minute=60)
    >>> key.key
    SecretStr('**********')
    """

    name: Name
    key: Secret = None
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)] | None = None
    models: Annotated[list[Name], Field(min_length=1)] | None = None
    may_override: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_in_flight: Count | None = None
    slo: SloSettings | None = None

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue unless exactly one of `key` and `sha256` is set."""
        present = [field for field in ("key", "sha256") if none_if_empty(data.get(field)) is not None]
        if len(present) == 2:
            yield Issue(("sha256",), "set together with key", "keep one of the two", at_key=True)
        elif not present and "key" in data:
            yield Issue(("key",), "the key is empty", "set its variable, or remove the entry")
        elif not present:
            yield Issue((), "has neither key nor sha256", "set one of the two")


class AdminSettings(Settings):
    """Access to `/admin`.

    Parameters
    ----------
    key
        The admin key. Null makes the gateway generate one at start and print it.
    """

    key: Secret = None
