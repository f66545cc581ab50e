"""Fields set in the JSON body of a request, with all its other bytes unchanged as far as possible."""

from __future__ import annotations

import re
from typing import Final

import orjson

_VALUE: Final = rb"-?\d{1,19}|null|true|false|\{[^{}]*\}"
_MAX_TRIED: Final = 8
_SMALL_BYTES: Final = 2**15


def insert_field(body: bytes, field: bytes) -> bytes:
    """Return a JSON object with a field before its others, of which it needs one, and none of that name.

    Examples
    --------
    >>> insert_field(b' {"model": "m"}', b'"priority":7')
    b' {"priority":7,"model": "m"}'
    """
    at = body.index(b"{") + 1
    return b"%b%b,%b" % (body[:at], field, body[at:])


def set_field(body: bytes, name: str, value: object) -> bytes:
    """Return a JSON object in which a field has a value.

    Examples
    --------
    >>> set_field(b'{"a": {"priority": 1}, "priority": -5, "b": 1.0}', "priority", 0)
    b'{"a": {"priority": 1}, "priority": 0, "b": 1.0}'
    >>> set_field(b'{"stream_options": null, "n": 1}', "stream_options", {"include_usage": True})
    b'{"stream_options": {"include_usage":true}, "n": 1}'
    """
    document = orjson.loads(body)
    written = orjson.dumps(value)
    if name not in document and document:
        return insert_field(body, b'"%b":%b' % (name.encode(), written))
    wanted = {**document, name: value}
    pattern = rb'"%b"[ \t\r\n]*:[ \t\r\n]*(%b)(?=[ \t\r\n]*[,}])' % (re.escape(name.encode()), _VALUE)
    most = _MAX_TRIED if len(body) <= _SMALL_BYTES else 1
    for tried, found in enumerate(re.finditer(pattern, body)):
        if tried == most:
            break
        changed = body[: found.start(1)] + written + body[found.end(1) :]
        if orjson.loads(changed) == wanted:
            return changed
    return orjson.dumps(wanted)
