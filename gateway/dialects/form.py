"""Forms (`multipart/form-data`), as clients upload files: read within bounds, and without copying what files hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.dialects.errors import GatewayError

_BOUNDARY: Final = re.compile(r'multipart/form-data;.*\bboundary="?([^";,]{1,70})', re.IGNORECASE)
_NAME: Final = re.compile(
    rb'\r\ncontent-disposition:[ \t]*form-data;[^\r\n]*?\bname="?([^";\r\n]{1,256})', re.IGNORECASE
)
_FILENAME: Final = re.compile(rb'\bfilename\*?="?([^";\r\n]{0,1024})', re.IGNORECASE)
_MOST_FIELDS: Final = 64
_MOST_HEAD_BYTES: Final = 8192
_MOST_VALUE_BYTES: Final = 1024
_MOST_SEARCHED_BYTES: Final = 1 << 22
_END_BYTES: Final = 1 << 16


class _Field(NamedTuple):
    name: str
    filename: str | None  # None if it is no file
    content: memoryview


def read_form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes | memoryview]]:
    r"""Return the fields of a form, each with the name of its file, and its content in the memory of the form.

    Examples
    --------
    >>> body = b'--x\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\nHi\r\n--x--\r\n'
    >>> name, content = read_form("multipart/form-data; boundary=x", body)["a"]
    >>> name, bytes(content)
    ('f', b'Hi')
    """
    fields = _fields(content_type, body, len(body))
    return {field.name: (field.filename or "", field.content) for field in fields}


def text_in_form(content_type: str, body: bytes, name: str) -> str:
    r"""Return the text of a field of a form; empty if there is none, or if the body is no form.

    Examples
    --------
    >>> body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    >>> text_in_form("multipart/form-data; boundary=x", body, "model"), text_in_form("text/plain", body, "model")
    ('whisper', '')
    """
    try:
        for field in _fields(content_type, body, _MOST_SEARCHED_BYTES):
            if field.name == name and field.filename is None:
                return bytes(field.content[:_MOST_VALUE_BYTES]).decode("utf-8", "replace")
    except GatewayError:
        pass  # what is wrong with it, its engine says
    return ""


def _fields(content_type: str, body: bytes, most_bytes: int) -> Iterator[_Field]:
    """Yield the fields within so many bytes, and those after a file that goes on beyond them, near the end."""
    boundary = _BOUNDARY.match(content_type)
    delimiter = b"\r\n--%b" % ("" if boundary is None else boundary[1]).encode("latin-1", "replace")
    at = len(delimiter) - 2 if boundary is not None and body.startswith(delimiter[2:]) else len(body)
    for _ in range(_MOST_FIELDS):
        begin = body.find(b"\r\n\r\n", at, at + _MOST_HEAD_BYTES) + 4
        name = _NAME.search(body, at, begin) if body.startswith(b"\r\n", at) else None
        if name is None:
            break
        end = body.find(delimiter, begin - 2, most_bytes)
        if end < 0 and most_bytes < len(body):
            end = body.find(delimiter, max(begin - 2, len(body) - _END_BYTES))
            most_bytes = len(body)
        if end < 0:
            break
        filename = _FILENAME.search(body, at, begin)
        yield _Field(
            name[1].decode("utf-8", "replace"),
            None if filename is None else filename[1].decode("utf-8", "replace"),
            memoryview(body)[begin : max(begin, end)],
        )
        at = end + len(delimiter)
    if not body.startswith(b"--", at):
        text = f"The body is no form with up to {_MOST_FIELDS} fields: send it as multipart/form-data."
        raise GatewayError(400, text, code="invalid_form")
