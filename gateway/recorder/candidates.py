"""The candidates of a decision as columns of a record: one list per field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from backends.backend import Backend, EngineLoad
from gateway.recorder.notes import RequestNotes
from gateway.recorder.rounding import micro
from policies.policy import Decision


class CandidateColumns:
    """Builds columns, reusing those of the last request of a model that are unchanged.

    The candidates of a model seldom change, and the loads that their engines report once a second.
    """

    def __init__(self) -> None:
        self._names_by_model: dict[str, tuple[Sequence[Backend], list[str], dict[str, Any]]] = {}
        self._loads_by_model: dict[str, tuple[list[EngineLoad], dict[str, Any]]] = {}

    def columns(self, model: str, notes: RequestNotes, decision: Decision) -> dict[str, Any]:
        """Return the candidates of a decision with their loads, predictions and propensities."""
        candidates, considered = notes.candidates, decision.considered
        columns = self._names(model, candidates).copy()
        if considered is None:
            columns["propensity"] = _implied(candidates, decision)
        elif considered.candidates is candidates:
            columns["prediction_s"] = [None if one is None else micro(one) for one in considered.predicted_s]
            columns["propensity"] = considered.propensities
        else:  # the policy excluded some candidates: their propensity is 0
            rows = zip(considered.candidates, considered.predicted_s, considered.propensities, strict=True)
            scores = {backend.name: (predicted_s, propensity) for backend, predicted_s, propensity in rows}
            ordered = [scores.get(backend.name, _EXCLUDED) for backend in candidates]
            columns["prediction_s"] = [None if one is None else micro(one) for one, _ in ordered]
            columns["propensity"] = [propensity for _, propensity in ordered]
        columns["in_flight"] = notes.in_flight
        columns |= self._engines(model, notes.loads)
        return columns

    def _names(self, model: str, candidates: Sequence[Backend]) -> dict[str, Any]:
        cached, methods = self._names_by_model.get(model), [backend.method.value for backend in candidates]
        if cached is not None and cached[0] == candidates and cached[1] == methods:
            return cached[2]
        columns = _serialized(backend=[backend.name for backend in candidates], method=methods)
        self._names_by_model[model] = candidates, methods, columns
        return columns

    def _engines(self, model: str, loads: list[EngineLoad]) -> dict[str, Any]:
        cached = self._loads_by_model.get(model)
        if cached is not None and cached[0] == loads:
            return cached[1]
        columns: dict[str, Any] = {}
        if any(load.at_s for load in loads):
            columns = _serialized(
                running=[load.running if load.at_s else None for load in loads],
                waiting=[load.waiting if load.at_s else None for load in loads],
            )
        self._loads_by_model[model] = loads, columns
        return columns


_EXCLUDED: tuple[float | None, float] = None, 0.0


def _implied(candidates: Sequence[Backend], decision: Decision) -> list[float | None]:
    """Return the propensities that follow from that of the chosen backend, the only one the policy reports."""
    chosen, others = decision.propensity, None
    if chosen >= 1.0 or len(candidates) == 2:
        others = micro(1.0 - chosen)
    return [chosen if backend.name == decision.backend else others for backend in candidates]


def _serialized(**columns: list[Any]) -> dict[str, Any]:
    """Return columns as JSON fragments."""
    return {name: orjson.Fragment(orjson.dumps(column)) for name, column in columns.items()}
