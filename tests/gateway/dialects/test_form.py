"""Forms: what is read of them, within which bounds."""

from __future__ import annotations

from functools import partial

import httpx
import pytest

from gateway.dialects.errors import GatewayError
from gateway.dialects.form import read_form, text_in_form

FIELDS = {"model": "whisper-é", "response_format": "json", "timestamp_granularities[]": ["word", "segment"]}


def encoded(size_bytes: int, count: int = 1) -> tuple[str, bytes]:
    """Return a form as httpx, and so OpenAI's client, writes it: its content type, and its body."""
    files = [("file", (f"{number}.wav", b"\r\n--" * (size_bytes // 4))) for number in range(count)]
    request = httpx.Request("POST", "http://x", data=FIELDS, files=files)
    return request.headers["content-type"], request.read()


def with_files_first(content_type: str, body: bytes) -> bytes:
    delimiter = b"--" + content_type.partition("boundary=")[2].encode()
    parts = body.removesuffix(b"--\r\n").split(delimiter)[1:-1]
    return delimiter.join([b"", *[each for each in parts if b"filename" in each], *parts[:-1]]) + delimiter + b"--\r\n"


@pytest.mark.parametrize("size_bytes", [4, 5 << 20])
@pytest.mark.parametrize("is_file_first", [False, True])
def test_the_model_is_found_before_and_after_a_file(size_bytes: int, is_file_first: bool) -> None:
    content_type, body = encoded(size_bytes)
    body = with_files_first(content_type, body) if is_file_first else body
    for kind in (content_type, content_type.replace("multipart/form-data", "Multipart/Form-Data")):
        assert text_in_form(kind, body, "model") == "whisper-é"
    assert text_in_form(content_type, body, "absent") == ""
    form = read_form(content_type, body)
    assert form["file"][0] == "0.wav"
    assert len(form["file"][1]) == size_bytes
    assert isinstance(form["file"][1], memoryview)


def test_a_file_is_no_text_and_a_text_in_a_file_is_no_field() -> None:
    request = httpx.Request(
        "POST", "http://x", files={"model": ("m", b"x"), "file": ("f", b'name="model"\r\n\r\nevil')}
    )
    assert text_in_form(request.headers["content-type"], request.read(), "model") == ""


@pytest.mark.parametrize(
    ("head", "model"),
    [
        (b'form-data; filename=" name=model"; name="file"', "first"),
        (b'form-data; name="file"; x="\\"; name=model"', "first"),
        (b'form-data; name="file"; NAME = model', "wanted"),
        (b"form-data; name*=utf-8''file; name=model", "wanted"),
        (b'attachment; name="model"', "wanted"),
        (b'form-data; name="model"\r\nContent-Type: text/plain', "wanted"),
    ],
)
def test_the_model_is_the_one_that_engines_read(head: bytes, model: str) -> None:
    first = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nfirst'
    body = first + b"\r\n--x\r\nContent-Disposition: " + head + b"\r\n\r\nwanted\r\n--x--\r\n"
    assert text_in_form('multipart/form-data; a="; boundary=y"; boundary=x', body, "model") == model


DISPOSITION = b"content-disposition: form-data; name="


@pytest.mark.parametrize(
    "body",
    [
        b"--x",
        b"--x\r\nname=a\r\n\r\n1\r\n--x--",
        b"\r\n--x\r\n" + DISPOSITION + b"a\r\n\r\n1\r\n--x--",
        b"--x\r\n" + DISPOSITION + b"a\r\n" + DISPOSITION + b"b\r\n\r\n1\r\n--x--",
        b"--x\r\n" + DISPOSITION + b"a\r\n\r\n--x\r\n" + DISPOSITION + b"b\r\n\r\n1\r\n--x--",
        b"{}",
    ],
)
@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=x", "multipart/form-data", "text/plain"])
def test_what_is_no_form_or_may_be_two_is_refused(content_type: str, body: bytes) -> None:
    for read in (read_form, partial(text_in_form, name="model")):
        with pytest.raises(GatewayError):
            read(content_type, body)


@pytest.mark.parametrize("charset", ["charset=utf-7", "charset=utf-16", "charset*=utf-8''utf-7", 'Charset="UTF-7"'])
def test_a_form_whose_names_may_be_written_otherwise_is_refused(charset: str) -> None:
    body = b"--x\r\n" + DISPOSITION + b"model\r\n\r\n1\r\n--x\r\n" + DISPOSITION + b"+AG0-odel\r\n\r\n2\r\n--x--"
    with pytest.raises(GatewayError, match="UTF-8"):
        text_in_form(f"multipart/form-data; boundary=x; {charset}", body, "model")
    assert text_in_form("multipart/form-data; charset=UTF-8; boundary=x", body, "model") == "1"


def test_forms_without_fields() -> None:
    assert read_form("multipart/form-data; boundary=x", b"--x--") == {}
    assert text_in_form("multipart/form-data", b"", "model") == ""


def test_fields_without_number_are_not_read() -> None:
    content_type, body = encoded(4, count=100)
    for read in (read_form, partial(text_in_form, name="model")):
        with pytest.raises(GatewayError, match="up to 64 fields"):
            read(content_type, body)
