"""The section `state`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    SecretStr,
)

from backends.validation import Issue
from gateway.config.settings.base import Name, Secret, Settings, none_if_empty


def _known_redis_url(url: SecretStr | None) -> SecretStr | None:
    if url is None:
        return None
    if find_spec("redis") is None:
        raise ValueError("needs the package redis: pip install '.[redis]' in a checkout (deploy/README.md#install)")
    from gateway.state.redis_client import without_credentials

    without_credentials(url.get_secret_value())
    return url


class StateSettings(Settings):
    """Store of learned statistics and rules: an SQLite file, a Redis that several gateways share, or `none`.

    Parameters
    ----------
    file
        SQLite file on a local disk. Null, without `redis`, uses one file per pool file in the user's state folder.
    redis
        `redis://[user:password@]host[:port][/database]`, `rediss://...` for TLS, or `unix:///path/to.sock`. After `?`
        come options of redis-py's connections, such as `ssl_ca_certs=/etc/ssl/redis-ca.pem`.
    prefix
        Prefix of the gateway's keys in Redis; gateways of the same pool need the same one.
    """

    file: Annotated[Path | None, BeforeValidator(none_if_empty)] = None
    redis: Annotated[Secret, AfterValidator(_known_redis_url)] = None
    prefix: Name = "gateway"

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if both a file and a Redis are set."""
        if data.get("file") is not None and none_if_empty(data.get("redis")) is not None:
            yield Issue(("redis",), "set together with file", "keep one of the two", at_key=True)


def _read_state(state: Any) -> Any:
    if state == "none":
        return None
    if not isinstance(state, Mapping | StateSettings):
        raise ValueError("expected `none`, or a mapping with `file` or `redis`")  # noqa: TRY004 -- pydantic reports only ValueError
    return state


_StateInput = StateSettings | Literal["none"]
State = Annotated[StateSettings | None, BeforeValidator(_read_state, json_schema_input_type=_StateInput)]
