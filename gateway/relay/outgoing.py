"""Builds the request for a backend: its head, and its body with the parameters that the gateway adds."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from gateway.dialects.asked_usage import IDS, USAGE, StreamHabits, asking
from gateway.dialects.sse import EventStream
from gateway.relay.roles import Rescuer
from gateway.routing.model import Upstream
from policies.features.request import Endpoint

DEEP: Final = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
"""Endpoints whose requests can set the draft depth of their engine."""
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})  # sent with a content length even if the body is empty

Added = tuple[bytes, ...]
"""Parameters that the gateway added to a request for a stream."""


def head_of(
    method: str, target: bytes, upstream: Upstream, body: bytes, lines: bytes, engine_id: bytes, keys: bytes
) -> bytes:
    """Return the head of a request; `keys` are the header lines with the client's key, in case engines check it."""
    api_key = upstream.backend.api_key
    if api_key is not None:
        keys = b"authorization: Bearer %b\r\n" % api_key.encode()
    length = b"content-length: %d\r\n" % len(body) if body or method in _WITH_BODY else b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bx-request-id: %b\r\n%b\r\n" % (
        method.encode(),
        target,
        upstream.client.address.authority,
        lines,
        keys,
        engine_id,
        length,
    )


def body_of(
    body: bytes,
    options: Mapping[str, object] | None,
    rescuer: Rescuer | None,
    habits: StreamHabits,
    declined: Set[bytes],
) -> tuple[bytes, Added]:
    """Return the body of a request for a stream, and the parameters added to it: none that the engine has declined."""
    added: Added = ()
    declined = habits.declined | declined
    with_ids = None if rescuer is None or IDS in declined else rescuer.body
    if with_ids is not None:
        body, added = with_ids, (IDS,)
    if options is not None and habits.may_ask and USAGE not in declined:
        body, added = asking(body, options), (*added, USAGE)
    return body, added


def learn_habits(
    habits: StreamHabits, events: EventStream, added: Added, rescuer: Rescuer | None, *, may_ask: bool
) -> None:
    """Learn how an engine writes streams, from a complete one of its own."""
    if rescuer is not None and rescuer.left:
        return
    if may_ask and USAGE not in added:
        habits.learn(events.last_events())
    if rescuer is not None and IDS in added and not rescuer.has_ids:
        habits.decline(IDS)  # it ignores them
