"""The sections `keys` and `admin`. A plain key is replaced by its SHA-256 as soon as it has been checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    model_validator,
)

from backends.validation import Issue
from gateway.config.settings.base import Count, Milliseconds, Name, Secret, Settings, none_if_empty

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
RESERVED_NAMES = frozenset({"admin", "anonymous", "unauthenticated"})
"""Names that the gateway gives to clients without a key of the list."""


class _KeyOrDigest(Settings):
    """Base of settings with a key: the key itself, or its SHA-256."""

    key: Secret = None
    sha256: Digest | None = None

    @model_validator(mode="after")
    def _keep_only_the_digest(self) -> Self:
        if self.key is not None:
            # The settings are frozen, but still under construction here.
            object.__setattr__(self, "sha256", hashlib.sha256(self.key.get_secret_value().encode()).hexdigest())
            object.__setattr__(self, "key", None)
        return self

    @property
    def digest(self) -> bytes | None:
        """SHA-256 of the key; None without a key."""
        return None if self.sha256 is None else bytes.fromhex(self.sha256)


def checked_address(text: str) -> str:
    """Return the text if it is `host:port`; raises as `address_of`."""
    address_of(text)
    return text


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises
    ------
    ValueError
        If the text has another form.

    Examples
    --------
    >>> address_of("127.0.0.1:9090"), address_of("[::1]:0")
    (('127.0.0.1', 9090), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = str(ip_address(host[1:-1]))
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("expected host:port, such as 127.0.0.1:9090 or [::1]:9090")
    return host, int(port)


class SloSettings(Settings):
    """Latency objective of requests that do not set their own by headers.

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
            yield Issue((), "has neither ttft_ms nor tpot_ms", "set one of them, or remove it")


class KeySettings(_KeyOrDigest):
    """An API key of a client, with its permissions and limits.

    Parameters
    ----------
    name
        Name of the key in logs and metrics.
    key
        The key itself; alternatively give its `sha256`. Only its SHA-256 is kept.
    sha256
        SHA-256 of the key, in hexadecimal.
    models
        Models that the key may use, by name; aliases are included. Null allows all, or none where `adapters` is set.
    adapters
        LoRA adapters that the key may use. Null allows all adapters of its models.
    may_override
        Whether its requests may choose their backend (`x-gateway-backend`, `x-gateway-method`).
    admin
        What the key may do at `/admin`: nothing, `read` (look, and explain requests) or also `write`. It covers all
        models, so a key with `models` cannot have it.
    requests_per_minute
        Limit on requests per minute.
    tokens_per_minute
        Limit on prompt and output tokens per minute.
    max_in_flight
        Limit on requests in flight at once.
    batches
        Whether the key may use files and batches.
    batch_tokens_per_day
        Limit on prompt and output tokens of the lines of its batches, per day (UTC).
    priority
        Priority of its requests where a model has a queue; lower ones are served first. A request can only lower its
        own further, by `priority` in its body.
    weight
        Share of a model relative to other keys of the same priority, where requests wait in its `queue`.
    tenant_header
        Header by which its requests name a tenant: tenants share alike what is the key's.
    slo
        Latency objective of requests that do not set their own by headers.
    slo_class
        Class of its requests, one of `slo_classes`, in place of `slo`.

    Examples
    --------
    >>> key = KeySettings(name="batch", key="sk-1", requests_per_minute=60)
    >>> key.key, key.sha256[:8]
    (None, '0f2c10bf')
    """

    name: Name
    key: Secret = None
    sha256: Digest | None = None
    models: Annotated[list[Name], Field(min_length=1)] | None = None
    adapters: Annotated[list[Name], Field(min_length=1)] | None = None
    may_override: bool = False
    admin: Literal["none", "read", "write"] = "none"
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_in_flight: Count | None = None
    batches: bool = True
    batch_tokens_per_day: Count | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    tenant_header: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]+$", to_lower=True)] | None = None
    slo: SloSettings | None = None
    slo_class: Name | None = None

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
        if (name := data.get("name")) is not None and str(name) in RESERVED_NAMES:
            yield Issue(("name",), "the gateway uses this name itself", "choose another")
        if data.get("slo") is not None and data.get("slo_class") is not None:
            yield Issue(("slo_class",), "set together with slo", "keep one of the two", at_key=True)
        bound = next((each for each in ("models", "adapters") if data.get(each) is not None), None)
        if bound is not None and data.get("admin", "none") != "none":
            yield Issue(("admin",), f"/admin is about all models, but {bound} bounds the key", "remove one of the two")


class AdminSettings(_KeyOrDigest):
    """Access to `/admin`.

    Parameters
    ----------
    key
        The admin key, which may do everything at `/admin`; alternatively give its `sha256`. Only its SHA-256 is kept.
        With neither, the environment variable `GATEWAY_ADMIN_KEY` sets it, unless that is one of `keys`; failing that,
        the gateway generates a key at start and prints it.
    sha256
        SHA-256 of the admin key, in hexadecimal.
    listen
        The only address, `host:port`, that serves `/admin` and `/dashboard`; port 0 picks a free one. Null serves them
        at the address of the gateway.
    metrics
        Whether `/metrics` too is served only there.
    """

    listen: Annotated[str, AfterValidator(checked_address)] | None = None
    metrics: bool = False

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue for two keys, and for `metrics` without an address."""
        if all(none_if_empty(data.get(field)) is not None for field in ("key", "sha256")):
            yield Issue(("sha256",), "set together with key", "keep one of the two", at_key=True)
        if data.get("metrics") is True and data.get("listen") is None:
            yield Issue(("metrics",), "needs admin.listen", "set it to an address of its own, such as 127.0.0.1:9090")
