"""What a body of JSON counts to, found without parsing it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.dialects.errors import GatewayError
from gateway.routing import large_bodies
from gateway.routing.large_bodies import check_cost

_TEXTS = ("", "a, [b]: {c}", '"', "\\", '\\"', "\\\\", 'x\\"\\\\', "é,[", "\n")


def _random(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5 if depth else 3)
    if kind == 0:
        return rng.randrange(10**6)
    if kind < 3:
        return rng.choice(_TEXTS) + rng.choice(_TEXTS)
    if kind == 3:
        return [_random(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(_TEXTS) + str(number): _random(rng, depth - 1) for number in range(rng.randrange(4))}


def _counted(value: Any) -> int:
    if isinstance(value, str):
        return 2
    if isinstance(value, list):
        return 16 + max(0, len(value) - 1) + sum(map(_counted, value))
    if isinstance(value, dict):
        return 16 + max(0, len(value) - 1) + sum(2 + 2 + _counted(inner) for inner in value.values())
    return 0


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1000])
def test_it_counts_what_is_outside_strings_wherever_a_piece_ends(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "_PIECE_BYTES", piece_bytes)
    rng = random.Random(piece_bytes)
    for _ in range(300):
        document = {"a": _random(rng, 4)}
        body = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()
        count = _counted(document)
        list(check_cost(body, count))
        with pytest.raises(GatewayError, match="max_body_values") as refused:
            list(check_cost(body, count - 1))
        assert refused.value.status == 413


def test_it_stops_at_the_piece_that_is_too_much() -> None:
    steps = check_cost(b'{"a":[' + b"{}," * 10**6, most=100_000)
    with pytest.raises(GatewayError):
        next(steps)
