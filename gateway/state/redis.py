"""A store in Redis, for gateways on several hosts.

Each page is a hash that expires when it no longer counts; an index tells the version of each. Whatever has to be done
in one go is a script there. Keys begin with a prefix, so that several pools can use one Redis.
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
_KINDS: tuple[tuple[type[Exception], str], ...] = (  # the first that fits
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
        What its keys begin with.

    Raises
    ------
    ValueError
        If the URL is none of these.
    """

    kind = "redis"

    def __init__(self, url: str, prefix: str) -> None:
        self.place = place(url)
        self._prefix = prefix
        self._client = Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # whoever calls comes again, and knows what that means
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
        return [Receipt(generation.decode(), batch) for generation, batch in self._ask(*commands)]

    def stamps(self, model: str) -> dict[str, str]:
        """See `Store.stamps`."""
        (index,) = self._ask(("HGETALL", self._index(model)))
        return {page.decode(): stamp.decode() for page, stamp in index.items()}

    def read(self, model: str, writer: str, pages: Sequence[str]) -> dict[str, Content]:
        """See `Store.read`."""
        hashes = self._ask(*(("HGETALL", self._page(model, page)) for page in pages))
        return {page: _content(fields, writer) for page, fields in zip(pages, hashes, strict=True) if fields}

    def versions(self) -> dict[str, int]:
        """See `Store.versions`."""
        (versions,) = self._ask(("HGETALL", self._documents()))
        return {name.decode(): int(version) for name, version in versions.items()}

    def history(self, name: str) -> list[Document]:
        """See `Store.history`."""
        (entries,) = self._ask(("LRANGE", self._history(name), 0, -1))
        return [_document(name, entry) for entry in entries]

    def put(self, document: Document) -> None:
        """See `Store.put`."""
        expected = document.version - 1
        keys = (self._documents(), self._history(document.name))
        (version,) = self._ask(
            ("EVAL", _PUT, len(keys), *keys, document.name, expected, _entry(document), VERSIONS_KEPT)
        )
        if version != expected:
            raise Conflict(document.name, version)

    def restore(self, documents: Iterable[Document]) -> None:
        """See `Store.restore`."""
        several = list(documents)
        keys = (self._documents(), self._history(several[0].name))
        entries = [part for document in several for part in (document.version, _entry(document))]
        self._ask(("EVAL", _RESTORE, len(keys), *keys, several[0].name, VERSIONS_KEPT, *entries))

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

    def _ask(self, *commands: Sequence[str | bytes | float]) -> list[Any]:
        """Send commands in one go, and return their answers."""
        with self._telling():
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipeline.execute())

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.RedisError, OSError) as error:
            kind = next(kind for known, kind in _KINDS if isinstance(error, known))
            raise StateError(kind, f"{self.place}: {error}") from error


def place(url: str) -> str:
    """Return a Redis URL without what is secret in it."""
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
        told = orjson.loads(entry)
        return Document(name, int(told["version"]), str(told["text"]), float(told["written_s"]))
    except (ValueError, KeyError, TypeError):
        raise StateError("foreign", f"a version of {name} is not ours") from None
