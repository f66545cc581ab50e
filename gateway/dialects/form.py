"""Reads the forms (`multipart/form-data`) with which clients upload files: within bounds, without copying files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.dialects.errors import GatewayError

_SEGMENT: Final = re.compile(rb';((?:"[^"]*"?|[^";])*)')
_CHARSETS: Final = frozenset({b"utf-8", b"utf8", b"us-ascii", b"iso-8859-1"})
"""Engines decode by the charset of the form: in these, ASCII reads the same."""
_MOST_FIELDS: Final = 64
_MOST_HEAD_BYTES: Final = 8192
_MOST_VALUE_BYTES: Final = 1024


class _Field(NamedTuple):
    name: str
    filename: str | None  # None if not a file
    content: memoryview


def read_form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes | memoryview]]:
    r"""Return the fields of a form by name: the name of the file, and the content as a view of the body.

    Examples
    --------
    >>> body = b'--x\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\nHi\r\n--x--\r\n'
    >>> name, content = read_form("multipart/form-data; boundary=x", body)["a"]
    >>> name, bytes(content)
    ('f', b'Hi')
    """
    return {field.name: (field.filename or "", field.content) for field in _fields(content_type, body)}


def text_in_form(content_type: str, body: bytes, name: str) -> str:
    r"""Return the text of the last field of that name, as engines do; empty if there is none.

    Examples
    --------
    >>> body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    >>> text_in_form("multipart/form-data; boundary=x", body, "model")
    'whisper'
    """
    fields = list(_fields(content_type, body)) if body else []
    texts = [field.content for field in fields if field.name == name and field.filename is None]
    return bytes(texts[-1][:_MOST_VALUE_BYTES]).decode("utf-8", "replace") if texts else ""


def _fields(content_type: str, body: bytes) -> Iterator[_Field]:
    """Yield the fields; raise `GatewayError` if this is no form, or another parser could read it differently."""
    parameters = _parameters(content_type.encode("latin-1", "replace"))
    boundary = parameters.get(b"boundary", b"")
    delimiter = b"\r\n--" + boundary
    at = len(delimiter) - 2 if boundary and body.startswith(delimiter[2:]) else len(body)
    if any(name.startswith(b"charset") and value.lower() not in _CHARSETS for name, value in parameters.items()):
        raise GatewayError(400, "The charset of the form is unknown here: send it in UTF-8.", code="invalid_form")
    for _ in range(_MOST_FIELDS):
        begin = body.find(b"\r\n\r\n", at, at + _MOST_HEAD_BYTES) + 4
        end = body.find(delimiter, begin - 2)
        if not body.startswith(b"\r\n", at) or begin < 4 or end < begin:  # for engines, no field ends before it begins
            break
        headers = [line.partition(b":") for line in body[at:begin].split(b"\r\n")]
        said = [_parameters(value) for name, _, value in headers if name.lower() == b"content-disposition"]
        if len(said) != 1 or b"name" not in said[0]:
            break
        filename = said[0].get(b"filename")
        yield _Field(
            said[0][b"name"].decode("utf-8", "replace"),
            None if filename is None else filename.decode("utf-8", "replace"),
            memoryview(body)[begin:end],
        )
        at = end + len(delimiter)
    if not body.startswith(b"--", at):
        text = f"The body is no form with up to {_MOST_FIELDS} fields: send it as multipart/form-data."
        raise GatewayError(400, text, code="invalid_form")


def _parameters(header: bytes) -> dict[bytes, bytes]:
    r"""Return the parameters of a header as engines read them: the last of duplicates.

    Examples
    --------
    >>> _parameters(rb'form-data; Name=a; filename="b\"; name=c"')
    {b'name': b'a', b'filename': b'b"; name=c'}
    """
    found = {}
    for segment in _SEGMENT.findall(b";" + header.replace(b'\\"', b"\0"))[1:]:
        name, equals, value = (part.strip(b" \t") for part in segment.partition(b"="))
        if value[:1] == value[-1:] == b'"':
            value = value[1:-1].replace(b"\\\\", b"\\")
        found[name.lower() if equals else name] = value.replace(b"\0", b'"')
    return found
