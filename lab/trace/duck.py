"""DuckDB for data larger than memory, configured with a small memory limit and without extensions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

MEMORY = "256MB"
_ROWS = 512  # fetched at a time as Python objects


@contextmanager
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an empty database that spills to disk; closing it removes its files."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="gateway-trace-") as folder:
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": 1,  # keeps rows in file order, and leaves the other cores to the caller
            "memory_limit": MEMORY,
            "temp_directory": folder,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        with duckdb.connect(str(Path(folder) / "rows.duckdb"), config=config) as connection:
            connection.execute("set enable_progress_bar_print = false")  # it would appear in the output after 2 s
            yield connection


def rows(connection: duckdb.DuckDBPyConnection, query: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query without holding them all in memory."""
    connection.execute(query, list(values))
    while batch := connection.fetchmany(_ROWS):
        yield from batch


def insert(connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Any]) -> None:
    """Insert rows, given as one array per column, in the table's order."""
    connection.register("batch", dict(columns))
    connection.execute(f"insert into {table} select * from batch")  # noqa: S608 -- a constant
    connection.unregister("batch")
