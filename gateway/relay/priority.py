"""The `priority` of a request, with vLLM's convention: lower ones are served first, and 0 is the default."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

import orjson

_FIELD: Final = re.compile(rb'"priority"[ \t\r\n]*:[ \t\r\n]*(-?\d{1,19})(?=[ \t\r\n]*[,}])')
_MAX_TRIED: Final = 8
_SMALL_BYTES: Final = 2**15
_LARGEST: Final = 2**31 - 1


def rank_of(key_priority: int, sent: object) -> int:
    """Return the rank of a request in the queue.

    A request can only lower its rank below that of its key: else all would claim the highest.

    Parameters
    ----------
    key_priority
        The priority of the client's key.
    sent
        `priority` in the body; anything but a number counts as 0.

    Examples
    --------
    >>> rank_of(0, None), rank_of(0, 5), rank_of(10, -20), rank_of(-10, 3)
    (0, 5, 10, -7)
    """
    if isinstance(sent, bool) or not isinstance(sent, int | float) or not math.isfinite(sent):
        return key_priority
    return key_priority + int(min(max(sent, 0), _LARGEST - abs(key_priority)))


def with_priority(body: bytes, value: int) -> bytes:
    """Return a JSON object with a `priority`, and all other bytes unchanged as far as possible.

    Examples
    --------
    >>> with_priority(b'{"a": {"priority": 1}, "priority": -5, "b": 1.0}', 0)
    b'{"a": {"priority": 1}, "priority": 0, "b": 1.0}'
    >>> with_priority(b'{"model": "m"}', 7)
    b'{"priority":7,"model": "m"}'
    """
    document = _loads(body)
    wanted = {**document, "priority": value}
    digits = b"%d" % value
    if "priority" not in document and document:
        return b'{"priority":%b,%b' % (digits, body[body.index(b"{") + 1 :])
    most = _MAX_TRIED if len(body) <= _SMALL_BYTES else 1
    for tried, found in enumerate(_FIELD.finditer(body)):
        if tried == most:
            break
        changed = body[: found.start(1)] + digits + body[found.end(1) :]
        if _loads(changed) == wanted:
            return changed
    try:
        return orjson.dumps(wanted)
    except orjson.JSONEncodeError:  # integers of more than 64 bits
        return json.dumps(wanted).encode()


def _loads(body: bytes) -> dict[str, Any]:
    document: dict[str, Any]
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = json.loads(body)  # accepts NaN and large integers, as the router does
    return document
