"""The lines of a batch: what must hold for each before any runs, and what is written of its answer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final, NamedTuple

import orjson

from gateway.batches.storage import Document

_MOST_PROBLEMS: Final = 100
_MISSING: Final = "missing_required_parameter"


class Checked(NamedTuple):
    """What was found in the lines of a file."""

    total: int
    model: str  # that all of them ask for
    problems: list[Document]  # in OpenAI's form; the first hundred


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> Document:
    """Return what is wrong with a batch, or with a line of it."""
    return {"code": code, "message": message, "param": param, "line": line}


def check(lines: Iterable[bytes], endpoint: str, most_lines: int) -> Checked:
    """Check all lines of a file; empty ones count as none.

    Examples
    --------
    >>> line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":"Hi"}}'
    >>> check([line], "/v1/completions", 9)
    Checked(total=1, model='m', problems=[])
    >>> [(each["code"], each["line"]) for each in check([line, line, b"{"], "/v1/completions", 9).problems]
    [('duplicate_custom_id', 2), ('invalid_json_line', 3)]
    """
    total, model, problems, ids = 0, "", list[Document](), set[int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        total += 1
        if total > most_lines:
            problems.append(problem("too_many_tasks", f"The file has more than {most_lines} lines.", number))
            break
        if (found := _problem(line, endpoint, model, ids)) is not None:
            problems.append(found | {"line": number})
            if len(problems) == _MOST_PROBLEMS:
                break
        elif not model:
            model = orjson.loads(line)["body"]["model"]
    if not total:
        problems.append(problem("empty_file", "The file has no lines."))
    return Checked(total, model, problems)


def _problem(line: bytes, endpoint: str, model: str, ids: set[int]) -> Document | None:
    """Return what is wrong with a line; `ids` are hashes of those before it."""
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return problem("invalid_json_line", f"This line is not valid JSON: {error}.")
    if not isinstance(document, dict):
        return problem("invalid_json_line", "A line is a JSON object with custom_id, method, url and body.")
    custom_id, body = document.get("custom_id"), document.get("body")
    fields = body if isinstance(body, dict) else {}
    asked = fields.get("model")
    is_new = isinstance(custom_id, str) and hash(custom_id) not in ids
    rules = (
        (isinstance(custom_id, str) and custom_id, _MISSING, "A line needs a text as custom_id.", "custom_id"),
        (is_new, "duplicate_custom_id", "A line before has the same custom_id.", "custom_id"),
        (document.get("method") == "POST", "invalid_method", "The method of a line is POST.", "method"),
        (document.get("url") == endpoint, "invalid_url", f"The url is that of the batch, {endpoint}.", "url"),
        (isinstance(body, dict), _MISSING, "The body of a line is a JSON object.", "body"),
        (isinstance(asked, str) and asked, _MISSING, "The body of a line names a model.", "body.model"),
        (asked == model or not model, "mismatched_model", "All lines ask for the same model.", "body.model"),
        (not fields.get("stream"), "invalid_request", "A line cannot ask for a stream.", "body.stream"),
    )
    for is_met, code, message, param in rules:
        if not is_met:
            return problem(code, message, param=param)
    ids.add(hash(custom_id))
    return None


def written(custom_id: str, response: Document | None, code: str = "", message: str = "") -> Document:
    """Return what is written of a line: its response, or why there is none."""
    error = None if response is not None else {"code": code, "message": message}
    return {"id": f"batch_req_{os.urandom(16).hex()}", "custom_id": custom_id, "response": response, "error": error}
