"""The formats of the log. Exceptions appear without their messages, which could quote a prompt or a key.

A record may have `fields`, by name: `log.info(text, extra={"fields": {"request_id": ...}})`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from backends.reported import printable
from gateway.telemetry.log_handler import LogHandler

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogFormat(logging.Formatter):
    """Formats records; an exception shows types and lines of code, and a message only if it is an OSError.

    Examples
    --------
    >>> try:
    ...     raise ValueError("a prompt")
    ... except ValueError as error:
    ...     shown = LogFormat().formatException((type(error), error, error.__traceback__))
    >>> shown.splitlines()[-1]
    'ValueError'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record. Ignore exception text that another formatter has cached."""
        kept, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = kept

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- overrides
        """Return the message, with further lines indented, and the fields as `name=value`."""
        record.message = "\n    ".join(map(printable, record.message.split("\n")))
        fields = [f"{name}={json.dumps(value, default=str)}" for name, value in fields_of(record).items()]
        return " ".join([super().formatMessage(record), *fields])

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 -- overrides
        """Return the traceback of an exception and of its causes."""
        if ei[1] is None:
            return ""
        return "\n".join(_lines_of(ei[1])).rstrip()


class JsonLogFormat(LogFormat):
    """Formats records as JSON, one object a line.

    Examples
    --------
    >>> record = logging.makeLogRecord({"created": 0.0, "name": "gateway", "levelname": "INFO", "msg": "started"})
    >>> JsonLogFormat().format(record)
    '{"time": "1970-01-01T00:00:00.000Z", "level": "INFO", "logger": "gateway", "message": "started"}'
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._own = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        document = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        document |= self._own | fields_of(record)
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record; none if it has none."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def configure_logging(level: int, log_format: str = "text", worker: int | None = None) -> None:
    """Write the log to standard error."""
    handler = LogHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonLogFormat(worker))
    else:
        number = "" if worker is None else f" [{worker}]"
        handler.setFormatter(LogFormat(f"%(asctime)s %(levelname)s %(name)s{number}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def place_of(error: BaseException) -> str:
    """Return the type of an exception, and the file and line that raised it.

    Examples
    --------
    >>> place_of(ValueError("a prompt"))
    'ValueError'
    """
    frames = traceback.extract_tb(error.__traceback__)
    return type(error).__name__ + (f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "")


def _lines_of(error: BaseException) -> Iterator[str]:
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        yield from _lines_of(earlier)
        yield "which led to:"
    yield "Traceback (most recent call last):"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield f"{type(error).__name__}: {printable(str(error))}" if isinstance(error, OSError) else type(error).__name__
