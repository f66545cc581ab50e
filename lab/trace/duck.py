"""DuckDB, for what is larger than memory: set up to stay small and to touch nothing but the files it is given."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

MEMORY = "256MB"
_ROWS = 512  # at a time, as objects of Python's


@contextmanager
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an empty database that keeps on disk, until it is closed, what does not fit its memory."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="gateway-trace-") as folder:
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": 1,  # rows stay in the order of the file, and whoever reads has the other cores
            "memory_limit": MEMORY,
            "temp_directory": folder,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        with duckdb.connect(str(Path(folder) / "rows.duckdb"), config=config) as connection:
            connection.execute("set TimeZone = 'UTC'")  # of times that name none
            yield connection


def rows(connection: duckdb.DuckDBPyConnection, query: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query as they come, without holding them all."""
    connection.execute(query, list(values))
    while some := connection.fetchmany(_ROWS):
        yield from some
