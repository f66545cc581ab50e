"""The candidates of a decision, as columns of a record: a list of each of their fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from backends.backend import Backend, EngineLoad
from gateway.recorder.rounding import micro
from gateway.recorder.take import RequestNotes
from policies.policy import Decision


class CandidateColumns:
    """Makes columns; what was the same for the request before is not made again.

    Who the candidates of a model are seldom changes, and what their engines say of themselves once a second.
    """

    def __init__(self) -> None:
        self._who: dict[str, tuple[Sequence[Backend], dict[str, Any]]] = {}
        self._loads: dict[str, tuple[list[EngineLoad], dict[str, Any]]] = {}

    def columns(self, model: str, take: RequestNotes, decision: Decision) -> dict[str, Any]:
        """Return what was known of the candidates of a decision, and what the policy thought of them."""
        candidates, considered = take.candidates, decision.considered
        columns = self._names(model, candidates).copy()
        if considered is None:
            columns["propensity"] = _implied(candidates, decision)
        elif considered.candidates is candidates:
            columns["prediction_s"] = [None if one is None else micro(one) for one in considered.predicted_s]
            columns["propensity"] = considered.propensities
        else:  # the policy left some out, which it could not have chosen
            thoughts = zip(considered.candidates, considered.predicted_s, considered.propensities, strict=True)
            thought = {one.name: (predicted_s, propensity) for one, predicted_s, propensity in thoughts}
            told = [thought.get(one.name, _LEFT_OUT) for one in candidates]
            columns["prediction_s"] = [None if one is None else micro(one) for one, _ in told]
            columns["propensity"] = [propensity for _, propensity in told]
        columns["in_flight"] = take.in_flight
        columns |= self._engines(model, take.loads)
        return columns

    def _names(self, model: str, candidates: Sequence[Backend]) -> dict[str, Any]:
        known = self._who.get(model)
        if known is not None and known[0] == candidates:
            return known[1]
        made = _packed(backend=[one.name for one in candidates], method=[one.method.value for one in candidates])
        self._who[model] = candidates, made
        return made

    def _engines(self, model: str, loads: list[EngineLoad]) -> dict[str, Any]:
        known = self._loads.get(model)
        if known is not None and known[0] == loads:
            return known[1]
        made: dict[str, Any] = {}
        if any(one.at_s for one in loads):
            made = _packed(
                running=[one.running if one.at_s else None for one in loads],
                waiting=[one.waiting if one.at_s else None for one in loads],
            )
        self._loads[model] = loads, made
        return made


_LEFT_OUT: tuple[float | None, float] = None, 0.0


def _implied(candidates: Sequence[Backend], decision: Decision) -> list[float | None]:
    """Return the propensities that follow from that of the choice, where the policy tells of no other."""
    chosen, others = decision.propensity, None
    if chosen >= 1.0 or len(candidates) == 2:
        others = micro(1.0 - chosen)
    return [chosen if one.name == decision.backend else others for one in candidates]


def _packed(**columns: list[Any]) -> dict[str, Any]:
    """Return columns as they are to be written."""
    return {name: orjson.Fragment(orjson.dumps(column)) for name, column in columns.items()}
