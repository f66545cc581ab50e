"""Rule: requests that go wrong on a way of speculating."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml
from pydantic import BaseModel, TypeAdapter

from gateway.rooms.advice.evidence import ModelEvidence
from gateway.rooms.advice.finding import Finding
from policies.trouble.troubles import TroubleFinding


class Known(BaseModel):
    """What is known of such trouble."""

    methods: frozenset[str]
    shapes: frozenset[str]
    problem: str
    where: str
    what: str


@cache
def known_troubles() -> tuple[Known, ...]:
    """Return what is known of engines that break on some requests."""
    text = files("gateway.rooms.advice").joinpath("known_troubles.yaml").read_text("utf-8")
    return TypeAdapter(tuple[Known, ...]).validate_python(yaml.safe_load(text))


def trouble(model: ModelEvidence) -> list[Finding]:
    """Return what goes wrong, with the thread about it where one is known."""
    return [
        Finding("trouble", model.name, each.place, str(each), None, _evidence(each), _change(each))
        for each in model.troubles
    ]


def _evidence(found: TroubleFinding) -> str:
    return f"{found.bad:.0f} of {found.tries:.0f}, each after {found.lost_s:.1f} s; elsewhere fewer do"


def _change(found: TroubleFinding) -> str:
    method = found.arm.partition(":")[0]
    for known in known_troubles():
        if method in known.methods and known.problem == found.problem and not known.shapes.isdisjoint(found.shape):
            return f"# Upgrade the engine; such requests go elsewhere meanwhile.\n# {known.where}\n# {known.what}"
    return "# Upgrade the engine, or report it to vLLM with such a request; they go elsewhere meanwhile."
