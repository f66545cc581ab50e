"""The file of `--state`: learned statistics of each policy of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from backends.validation import UsageError
from policies.statistics import Row


def read_learned(path: Path) -> dict[str, list[Row]]:
    """Return the learned statistics by policy name."""
    try:
        document = orjson.loads(path.read_bytes())
        return {
            policy: [Row(table, 0, tuple(key), tuple(sums)) for table, key, sums in rows]
            for policy, rows in document["learned"].items()
        }
    except OSError as error:
        raise UsageError(f"--state {path}: cannot read the file: {error.strerror}") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"--state {path}: not a file written by `gateway replay --state`") from None


def write_learned(path: Path, learned: Mapping[str, Sequence[Row]]) -> None:
    """Write the learned statistics of each policy."""
    rows = {name: [(row.table, row.key, row.sums) for row in of_policy] for name, of_policy in learned.items()}
    path.write_bytes(orjson.dumps({"learned": rows}))
