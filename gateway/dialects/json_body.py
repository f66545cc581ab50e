"""Decodes the JSON body of a request, and sets fields in it."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.dialects.errors import GatewayError

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Begins the JSON of some clients; engines ignore it, as RFC 8259 allows."""
ESCAPE: Final = b"\\u00"
"""May write a letter of a name."""
_NUMBER = re.compile(rb"\s*:\s*(-?[0-9][0-9.eE+-]*)(?=\s*[,}])")


def decoded_body(body: bytes) -> Any:
    """Return what a body contains, after a byte order mark if it begins with one."""
    return orjson.loads(body.removeprefix(BYTE_ORDER_MARK))


def insert_field(body: bytes, field: bytes) -> bytes:
    """Insert a field at the front of a JSON object, which must have other fields, none of that name.

    Examples
    --------
    >>> insert_field(b' {"model": "m"}', b'"priority":7')
    b' {"priority":7,"model": "m"}'
    """
    at = body.index(b"{") + 1
    return b"%b%b,%b" % (body[:at], field, body[at:])


def set_field(body: bytes, name: str, value: object) -> bytes:
    r"""Return a JSON object with a field set; reserialize it only if the name may occur twice in it.

    Raises `GatewayError` if the object is nested too deeply.

    Examples
    --------
    >>> set_field(b'{"priority": -5, "seed": 12345678901234567890123456}', "priority", 0)
    b'{"priority": 0, "seed": 12345678901234567890123456}'
    >>> set_field(b'{"a": {"priority": 1}, "priority": -5, "b": 1.0}', "priority", 0)
    b'{"a":{"priority":1},"priority":0,"b":1.0}'
    >>> set_field(BYTE_ORDER_MARK + b'{"priority": -5}', "priority", 0)
    b'\xef\xbb\xbf{"priority": 0}'
    >>> set_field(b'{"n": 1}', "stream_options", {"include_usage": True})
    b'{"stream_options":{"include_usage":true},"n": 1}'
    """
    document = decoded_body(body)
    try:
        if name not in document and document:
            return insert_field(body, b'"%b":%b' % (name.encode(), orjson.dumps(value)))
        quoted = b'"%b"' % name.encode()
        is_once = body.count(quoted) == 1 and ESCAPE not in body
        number = _NUMBER.match(body, body.find(quoted) + len(quoted)) if is_once else None
        if number is not None:  # the name occurs once, so it is this field's
            return body[: number.start(1)] + orjson.dumps(value) + body[number.end(1) :]
        return orjson.dumps({**document, name: value})
    except orjson.JSONEncodeError:
        raise GatewayError(400, "The body is nested too deeply: send fewer levels.", code="invalid_json") from None
