"""The candidates of a decision, as a record has them.

Since version 3 they are columns: an object with a list for each of the fields of `TraceCandidate`, all as long. Before,
and in what others write, they are a list of objects or of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lab.trace.record import TraceCandidate
from lab.trace.values import METHODS, kind_of, read_count, read_method, read_number, read_share, read_text

_COLUMNS: dict[str, Callable[[object], Any]] = {
    "method": read_method,
    "prediction_s": read_number,
    "propensity": read_share,
    "in_flight": read_count,
    "running": read_count,
    "waiting": read_count,
}
"""The fields after `backend`, in their order."""


def read_candidates(value: object) -> tuple[TraceCandidate, ...]:
    """Read candidates, whichever version wrote them.

    Raises
    ------
    ValueError
        If they are neither a list nor columns, or one of them is no candidate.
    """
    if isinstance(value, dict):
        return _from_columns(value)
    if isinstance(value, list):
        return tuple(map(_candidate, value))
    raise ValueError(f"expected columns or a list, not {kind_of(value)}")


def columns(candidates: Sequence[TraceCandidate]) -> dict[str, list[Any]]:
    """Return the columns of candidates; what none of them has is left out."""
    told = dict(zip(TraceCandidate._fields, map(list, zip(*candidates, strict=True)), strict=True))
    return {name: column for name, column in told.items() if set(column) - {None, ""}}


def _from_columns(told: dict[str, Any]) -> tuple[TraceCandidate, ...]:
    names = told.get("backend")
    if not isinstance(names, list):
        raise ValueError("candidates without backends")  # noqa: TRY004 -- the file's fault
    read = [list(map(read_text, names))]
    for name, reader in _COLUMNS.items():
        missing = TraceCandidate._field_defaults[name]
        column = told.get(name)
        if column is None:
            read.append([missing] * len(names))
            continue
        if not isinstance(column, list) or len(column) != len(names):
            raise ValueError(f"{name}: expected a list of {len(names)}")
        try:
            read.append([missing if one is None else reader(one) for one in column])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(map(TraceCandidate, *read))


def _candidate(value: object) -> TraceCandidate:
    if isinstance(value, str):
        return TraceCandidate(value)
    if not isinstance(value, dict):
        raise ValueError(f"expected objects, not {kind_of(value)}")  # noqa: TRY004 -- the file's fault
    get = value.get  # a trace has several of these to each of its lines
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
