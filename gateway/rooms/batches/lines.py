"""The lines of a batch: the checks of each before any runs, and the output of its answer.

The body of a line goes to the engine verbatim, so it is cut out of the file, not parsed and reserialized.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.dialects.errors import GatewayError
from gateway.routing.large_bodies import check_cost

Document = dict[str, Any]

MOST_LINE_BYTES: Final = 8 << 20
_MOST_VALUES: Final = 300_000
"""Limit for a line, by `check_cost`; smaller than for a request, since a file has many. Parsing takes 30 ms."""
_MOST_PROBLEMS: Final = 100
_MISSING: Final = "missing_required_parameter"
_BEGINNING_BYTES: Final = 1 << 13
"""Start of an unparsable line that is searched for its custom_id."""
_LARGE_BYTES: Final = 1 << 15
_NAME: Final = re.compile(r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_CUSTOM_ID: Final = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_VALUES: Final = json.JSONDecoder(parse_int=str, parse_float=str)


@dataclass(eq=False, slots=True)
class Line:
    """A line without an answer yet."""

    number: int
    custom_id: str
    body: bytes = b""
    error: GatewayError | None = None  # why it cannot be sent
    runs: int = 0  # at engines, except those refused or given up
    given_up: int = 0  # times that it made room for requests
    refused: int = 0  # times that an engine had no place for it
    backend: str = ""  # to which it was last sent
    not_before_s: float = 0.0  # when it may be sent again

    @property
    def must_end(self) -> bool:
        """Whether it must not be given up again."""
        return self.given_up > 1


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> Document:
    """Return the error of a batch, or of a line of it."""
    return {"code": code, "message": message, "param": param, "line": line}


def in_turns(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines; after a large one, leave as much time to other threads, which answer requests."""
    for line in lines:
        began_s = time.thread_time()
        yield line
        if len(line) > _LARGE_BYTES:
            time.sleep(max(0.0, time.thread_time() - began_s))  # it may resume in another thread


def read_line(number: int, raw: bytes) -> Line:
    """Return a line; if it cannot be sent, with its error.

    Examples
    --------
    >>> line = read_line(0, b'{"custom_id": "a", "body": {"seed": 12345678901234567890123456, "priority": -99}}')
    >>> line.custom_id, line.body, line.error
    ('a', b'{"seed": 12345678901234567890123456, "priority": 0}', None)
    """
    try:
        fields, text = parsed(raw), raw.decode()
        body = text[_spans(text)["body"]]
        priority = fields["body"].get("priority", 0)
        if not (isinstance(priority, int | float) and priority >= 0):  # lines must not overtake requests
            span = _spans(body)["priority"]
            body = f"{body[: span.start]}0{body[span.stop :]}"
        return Line(number, fields["custom_id"], body.encode())
    except GatewayError as known:
        error = known
    except Exception as unknown:  # noqa: BLE001 -- a bad line must not stop others
        error = GatewayError(400, f"This line cannot be read: {unknown}", code="invalid_json_line")
    return Line(number, _custom_id(raw), error=error)


def parsed(raw: bytes, *, most_bytes: int = MOST_LINE_BYTES) -> Any:
    """Parse untrusted JSON; raise if it is too long, too costly to parse, or invalid."""
    if len(raw) > most_bytes:
        raise GatewayError(413, f"A line has at most {most_bytes >> 20} MiB.", code="line_too_large")
    for _ in check_cost(raw, _MOST_VALUES):
        pass
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise GatewayError(400, f"This is no JSON: {error}", code="invalid_json_line") from None


def _custom_id(raw: bytes) -> str:
    """Return the custom_id of an unparsable line; empty if none is found."""
    found = _CUSTOM_ID.search(raw[:_BEGINNING_BYTES])
    try:
        return "" if found is None else str(orjson.loads(found[1]))
    except orjson.JSONDecodeError:
        return ""


def _spans(document: str) -> dict[str, slice]:
    """Return the position of each field's value in an object; for duplicates the last, as parsers do."""
    spans, at = dict[str, slice](), 0
    while (name := _NAME.match(document, at)) is not None:
        _, at = _VALUES.raw_decode(document, name.end())
        spans[orjson.loads(name[1])] = slice(name.end(), at)
    return spans


def check(lines: Iterable[bytes], endpoint: str, most_lines: int) -> tuple[int, str, list[Document]]:
    """Check all lines of a file; return how many are not empty, the model that all request, and the first problems.

    A line with a custom_id that is invalid JSON or too large gets its error among the answers.

    Examples
    --------
    >>> line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"Hi"}}'
    >>> check([line], "/v1/completions", 9)
    (1, 'm', [])
    >>> [(each["code"], each["line"]) for each in check([line, line, b"{"], "/v1/completions", 9)[2]]
    [('duplicate_custom_id', 2), ('invalid_json_line', 3)]
    """
    total, model, problems, ids = 0, "", list[Document](), set[int]()
    for number, raw in enumerate(in_turns(lines), 1):
        if not raw.strip():
            continue
        total += 1
        if total > most_lines:
            problems.append(problem("too_many_tasks", f"The file has more than {most_lines} lines.", number))
            break
        custom_id, found = "", None
        try:
            fields = parsed(raw)
            found = _problem(fields, endpoint, model)
            if found is None:
                custom_id, model = fields["custom_id"], fields["body"]["model"]
        except GatewayError as error:
            custom_id = _custom_id(raw)
            if not custom_id:
                found = problem(error.code or "", error.message)
        if found is None and hash(custom_id) in ids:
            found = problem("duplicate_custom_id", "A line before has the same custom_id.", param="custom_id")
        ids.add(hash(custom_id))
        if found is not None:
            problems.append(found | {"line": number})
            if len(problems) == _MOST_PROBLEMS:
                break
    if not total:
        problems.append(problem("empty_file", "The file has no lines."))
    return total, model, problems


def _problem(document: object, endpoint: str, model: str) -> Document | None:
    """Return the problem of a line that is valid JSON; None if it has none."""
    if not isinstance(document, dict):
        return problem("invalid_json_line", "A line is a JSON object with custom_id, method, url and body.")
    custom_id, body = document.get("custom_id"), document.get("body")
    fields = body if isinstance(body, dict) else {}
    asked = fields.get("model")
    rules = (
        (isinstance(custom_id, str) and custom_id, _MISSING, "A line needs a text as custom_id.", "custom_id"),
        (document.get("method") == "POST", "invalid_method", "The method of a line is POST.", "method"),
        (document.get("url") == endpoint, "invalid_url", f"The url is that of the batch, {endpoint}.", "url"),
        (isinstance(body, dict), _MISSING, "The body of a line is a JSON object.", "body"),
        (isinstance(asked, str) and asked, _MISSING, "The body of a line names a model.", "body.model"),
        (asked == model or not model, "mismatched_model", "All lines ask for the same model.", "body.model"),
        (not fields.get("stream"), "invalid_request", "A line cannot ask for a stream.", "body.stream"),
    )
    return next((problem(code, text, param=param) for is_met, code, text, param in rules if not is_met), None)


def written(custom_id: str, response: Document | None, code: str = "", message: str = "") -> bytes:
    """Return the output of a line: its response, or why there is none."""
    error = None if response is not None else {"code": code, "message": message}
    document = {"id": f"batch_req_{os.urandom(16).hex()}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(document)
