"""Reading and writing the candidates of a recorded decision.

Since version 3 they are columns: an object with one list per field of `TraceCandidate`, all of the same length. Earlier
versions and other writers have a list of objects or of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lab.trace.record import TraceCandidate
from lab.trace.values import METHODS, describe_type, read_count, read_method, read_number, read_share, read_text

_COLUMNS: dict[str, Callable[[object], Any]] = {
    "method": read_method,
    "prediction_s": read_number,
    "propensity": read_share,
    "in_flight": read_count,
    "running": read_count,
    "waiting": read_count,
}
"""The fields of `TraceCandidate` after `backend`, in order."""


def read_candidates(value: object) -> tuple[TraceCandidate, ...]:
    """Read candidates as written by any version.

    Examples
    --------
    >>> [candidate.backend for candidate in read_candidates({"backend": ["a", "b"], "in_flight": [2, 0]})]
    ['a', 'b']
    """
    if isinstance(value, dict):
        return _from_columns(value)
    if isinstance(value, list):
        return tuple(map(_candidate, value))
    raise ValueError(f"expected columns or a list, not {describe_type(value)}")


def columns(candidates: Sequence[TraceCandidate]) -> dict[str, list[Any]]:
    """Return candidates as columns; a field that none of them has is left out."""
    every_field = dict(zip(TraceCandidate._fields, map(list, zip(*candidates, strict=True)), strict=True))
    return {name: column for name, column in every_field.items() if set(column) - {None, ""}}


def _from_columns(document: dict[str, Any]) -> tuple[TraceCandidate, ...]:
    names = document.get("backend")
    if not isinstance(names, list):
        raise ValueError("candidates without backends")  # noqa: TRY004 -- invalid data, not a wrong argument
    read = [list(map(read_text, names))]
    for name, reader in _COLUMNS.items():
        missing = TraceCandidate._field_defaults[name]
        column = document.get(name)
        if column is None:
            read.append([missing] * len(names))
            continue
        if not isinstance(column, list) or len(column) != len(names):
            raise ValueError(f"{name}: expected a list of {len(names)}")
        try:
            read.append([missing if entry is None else reader(entry) for entry in column])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(map(TraceCandidate, *read))


def _candidate(value: object) -> TraceCandidate:
    if isinstance(value, str):
        return TraceCandidate(value)
    if not isinstance(value, dict):
        raise ValueError(f"expected objects, not {describe_type(value)}")  # noqa: TRY004 -- invalid data, not a wrong argument
    get = value.get  # this runs several times per line of a trace
    name = get("backend")
    if name is None and (name := get("name")) is None:
        raise ValueError("a candidate without backend")
    method = get("method") or ""
    prediction_s = get("prediction_s")
    if prediction_s is None and (prediction_s := get("predicted_s")) is None:
        prediction_s = get("prediction")
    propensity, in_flight, running, waiting = get("propensity"), get("in_flight"), get("running"), get("waiting")
    return TraceCandidate(
        name if type(name) is str else read_text(name),
        METHODS.get(method) or read_method(method),
        None if prediction_s is None else read_number(prediction_s),
        None if propensity is None else read_share(propensity),
        None if in_flight is None else read_count(in_flight),
        None if running is None else read_count(running),
        None if waiting is None else read_count(waiting),
    )
