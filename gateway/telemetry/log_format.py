"""The format of the log. Exceptions are shown without their messages, which could quote a prompt or a key."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogFormat(logging.Formatter):
    """Formats records; of an exception it shows the types and the lines of code, and the message only of an OSError.

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
        """Return the text of a record. An exception that another formatter has made text of is formatted again."""
        kept, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = kept

    def formatException(self, ei: _ExceptionInfo) -> str:  # noqa: N802 -- overrides
        """Return the traceback of an exception, and of those that led to it."""
        if ei[1] is None:
            return ""
        return "\n".join(_lines_of(ei[1])).rstrip()


def configure_logging(prefix: str, level: int) -> None:
    """Write the log to standard error.

    Parameters
    ----------
    prefix
        What stands before each message, as for `logging.Formatter`.
    level
        Lowest level that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormat(f"{prefix}: %(message)s"))
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
    yield f"{type(error).__name__}: {error}" if isinstance(error, OSError) else type(error).__name__
