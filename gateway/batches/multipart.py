"""Forms with files, as browsers and OpenAI's client send them."""

from __future__ import annotations

from email.message import Message
from typing import Final, NamedTuple

from gateway.dialects.errors import GatewayError

_MOST_PARTS: Final = 16
_MOST_HEAD_BYTES: Final = 8192


class Field(NamedTuple):
    """A field of a form."""

    file_name: str  # empty if it is no file
    content: memoryview


def read_form(content_type: str, body: bytes) -> dict[str, Field]:
    r"""Return the fields of a form by name, which share its memory.

    Examples
    --------
    >>> body = b'--x\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\nHi\r\n--x--\r\n'
    >>> name, content = read_form("multipart/form-data; boundary=x", body)["a"]
    >>> name, bytes(content)
    ('f', b'Hi')
    """
    boundary = _header("content-type", content_type).get_boundary()
    delimiter, fields = b"\r\n--%b" % (boundary or "").encode("latin-1", "replace"), dict[str, Field]()
    at = len(delimiter) - 2
    if not boundary or not body.startswith(delimiter[2:]):
        raise _invalid()
    while body[at : at + 2] == b"\r\n":
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEAD_BYTES)
        end = body.find(delimiter, head_end + 4)
        if head_end < 0 or end < 0 or len(fields) == _MOST_PARTS:
            raise _invalid()
        for line in body[at + 2 : head_end].decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() == "content-disposition":
                header = _header(name, value.strip())
                field_name = str(header.get_param("name", "", header=name))
                fields[field_name] = Field(header.get_filename("") or "", memoryview(body)[head_end + 4 : end])
        at = end + len(delimiter)
    return fields


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value.replace("\n", "")
    return message


def _invalid() -> GatewayError:
    text = f"The body is no form with up to {_MOST_PARTS} fields: send it as multipart/form-data."
    return GatewayError(400, text, code="invalid_form")
