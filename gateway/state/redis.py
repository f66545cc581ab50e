"""A store in Redis, for gateways on several hosts.

Each page is a hash that expires with its epoch; an index holds the version of each. Atomic updates are Lua scripts. All
keys have a prefix, so that several pools can share one Redis.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import orjson
from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway.state.store import (
    VERSIONS_KEPT,
    Conflict,
    Content,
    Document,
    Push,
    Receipt,
    StateError,
    read_key,
    read_sums,
    write_key,
    write_sums,
)
from policies.statistics import Key, Sums

_CONNECT_S = 0.5
_ANSWER_S = 1.0
_SCRIPTS = resources.files("gateway.state") / "redis_scripts"
_PUSH, _PUT, _RESTORE = ((_SCRIPTS / f"{name}.lua").read_text(encoding="utf-8") for name in ("push", "put", "restore"))
_KINDS: tuple[tuple[type[Exception], str], ...] = (  # the first match counts
    (exceptions.TimeoutError, "timeout"),
    (exceptions.OutOfMemoryError, "full"),
    (exceptions.AuthenticationError, "refused"),
    (exceptions.ConnectionError, "unreachable"),
    (exceptions.RedisError, "refused"),
    (OSError, "unreachable"),
)


class RedisStore:
    """A `Store` in Redis.

    Parameters
    ----------
    url
        `redis://[user:password@]host[:port][/database]`, `rediss://...` for TLS, or `unix:///path`.
    prefix
        Prefix of all its keys.

    Raises
    ------
    ValueError
        If the URL has none of these forms.
    """

    kind = "redis"

    def __init__(self, url: str, prefix: str) -> None:
        self.location = without_credentials(url)
        self._prefix = prefix
        self._client = Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # the caller retries, and handles replies that were lost
            protocol=2,
            single_connection_client=False,
            client_name="speculation-gateway",
        )

    def push(self, model: str, writer: str, pushes: Sequence[Push]) -> list[Receipt]:
        """See `Store.push`."""
        commands: list[Sequence[str | bytes | float]] = []
        for push in pushes:
            buckets = [text for key, sums in push.rows.items() for text in (write_key(key), write_sums(sums))]
            head = (push.page, repr(push.end_s), int(time.time()), writer, push.generation, push.batch, uuid4().hex)
            keys = (self._page(model, push.page), self._index(model))
            commands.append(("EVAL", _PUSH, len(keys), *keys, *head, *buckets))
        return [Receipt(generation.decode(), batch) for generation, batch in self._execute(*commands)]

    def stamps(self, model: str) -> dict[str, str]:
        """See `Store.stamps`."""
        (index,) = self._execute(("HGETALL", self._index(model)))
        return {page.decode(): stamp.decode() for page, stamp in index.items()}

    def read(self, model: str, writer: str, pages: Sequence[str]) -> dict[str, Content]:
        """See `Store.read`."""
        hashes = self._execute(*(("HGETALL", self._page(model, page)) for page in pages))
        return {page: _content(fields, writer) for page, fields in zip(pages, hashes, strict=True) if fields}

    def versions(self) -> dict[str, int]:
        """See `Store.versions`."""
        (versions,) = self._execute(("HGETALL", self._documents()))
        return {name.decode(): int(version) for name, version in versions.items()}

    def history(self, name: str) -> list[Document]:
        """See `Store.history`."""
        (entries,) = self._execute(("LRANGE", self._history(name), 0, -1))
        return [_document(name, entry) for entry in entries]

    def put(self, document: Document) -> None:
        """See `Store.put`."""
        expected = document.version - 1
        keys = (self._documents(), self._history(document.name))
        (version,) = self._execute(
            ("EVAL", _PUT, len(keys), *keys, document.name, expected, _entry(document), VERSIONS_KEPT)
        )
        if version != expected:
            raise Conflict(document.name, version)

    def restore(self, documents: Iterable[Document]) -> None:
        """See `Store.restore`."""
        versions = list(documents)
        keys = (self._documents(), self._history(versions[0].name))
        entries = [part for document in versions for part in (document.version, _entry(document))]
        self._execute(("EVAL", _RESTORE, len(keys), *keys, versions[0].name, VERSIONS_KEPT, *entries))

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    def _page(self, model: str, page: str) -> str:
        return f"{self._prefix}:page:{model}:{page}"

    def _index(self, model: str) -> str:
        return f"{self._prefix}:pages:{model}"

    def _documents(self) -> str:
        return f"{self._prefix}:documents"

    def _history(self, name: str) -> str:
        return f"{self._prefix}:document:{name}"

    def _execute(self, *commands: Sequence[str | bytes | float]) -> list[Any]:
        """Send commands in one pipeline, and return their replies."""
        with self._translate_errors():
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipeline.execute())

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.RedisError, OSError) as error:
            kind = next(kind for error_type, kind in _KINDS if isinstance(error, error_type))
            raise StateError(kind, f"{self.location}: {error}") from error


def without_credentials(url: str) -> str:
    """Return a Redis URL without user and password.

    Examples
    --------
    >>> without_credentials("redis://user:secret@cache/2")
    'redis://cache:6379/2'
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or "localhost"
    return f"{parts.scheme}://{host}:{parts.port or 6379}{parts.path}"


def _content(fields: dict[bytes, bytes], writer: str) -> Content:
    rows: dict[Key, Sums] = {
        read_key(field): read_sums(value) for field, value in fields.items() if not field.startswith(b".")
    }
    batch = int(fields.get(b".batch " + writer.encode(), b"0"))
    return Content(fields.get(b".generation", b"").decode(), batch, rows)


def _entry(document: Document) -> bytes:
    return orjson.dumps({"version": document.version, "text": document.text, "written_s": document.written_s})


def _document(name: str, entry: bytes) -> Document:
    try:
        fields = orjson.loads(entry)
        return Document(name, int(fields["version"]), str(fields["text"]), float(fields["written_s"]))
    except (ValueError, KeyError, TypeError):
        raise StateError("foreign", f"a version of {name} was not written by the gateway") from None
