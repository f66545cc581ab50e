"""Fields set in the JSON body of a request."""

from __future__ import annotations

import orjson


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
    """Return a JSON object in which a field has a value; only one that has it already is written anew.

    Examples
    --------
    >>> set_field(b'{"a": {"priority": 1}, "priority": -5, "b": 1.0}', "priority", 0)
    b'{"a":{"priority":1},"priority":0,"b":1.0}'
    >>> set_field(b'{"n": 1}', "stream_options", {"include_usage": True})
    b'{"stream_options":{"include_usage":true},"n": 1}'
    """
    document = orjson.loads(body)
    if name not in document and document:
        return insert_field(body, b'"%b":%b' % (name.encode(), orjson.dumps(value)))
    return orjson.dumps({**document, name: value})
