"""Requests beyond a drafter's limit are kept away from the replicas that they harm, under any policy."""

from __future__ import annotations

import pytest

from backends.backend import Backend
from backends.drafter_limit import Beyond, DrafterLimit
from backends.speculation import Method
from policies.drafter_limits import sparing, surviving
from policies.features.request import Endpoint, RequestFeatures

LIMITS = {"-": None} | {kind.value[0]: DrafterLimit(2048, kind) for kind in Beyond}  # worse, none, batch, crash
SHORT, LONG = 300, 4000


def _pool(kinds: str, in_flight: tuple[int, ...] = ()) -> list[Backend]:
    counts = in_flight or (0,) * len(kinds)
    return [
        Backend(str(number), "m", Method.EAGLE3, "", drafter_limit=LIMITS[kind], in_flight=count)
        for number, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]


def _request(prompt_tokens: int, max_tokens: int | None = None) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


@pytest.mark.parametrize("narrow", [surviving, sparing])
@pytest.mark.parametrize(
    ("kinds", "tokens"), [("----", LONG), ("-wnn", LONG), ("bbcc", SHORT)], ids=["no limits", "alone", "within"]
)
def test_the_candidates_stay_what_they_are_where_nobody_is_harmed(narrow, kinds: str, tokens: int) -> None:  # type: ignore[no-untyped-def]
    pool = _pool(kinds)
    assert narrow(_request(tokens), pool) == pool


@pytest.mark.parametrize(
    ("kinds", "in_flight", "chosen"),
    [
        ("-bbb", (9, 1, 1, 1), "0"),  # the one without a limit, while it is not overloaded
        ("-bbb", (10, 1, 1, 1), "1"),  # beyond 8 + 1.25 times the least, the first of those that are harmed
        ("-bbb", (12, 10, 1, 1), "2"),  # and the next one beyond that
        ("-bwb", (9, 1, 9, 1), "02"),
        ("bbbb", (9, 1, 1, 1), "0"),  # gathered
        ("bbbb", (10, 1, 1, 1), "1"),
        ("bbbb", (50, 40, 41, 40), "0"),
        ("cbbb", (1, 1, 1, 1), "0"),  # `surviving` is asked first; here there was nothing else
    ],
)
def test_long_requests_gather_on_as_few_replicas_as_they_need(
    kinds: str, in_flight: tuple[int, ...], chosen: str
) -> None:
    assert "".join(one.name for one in sparing(_request(LONG), _pool(kinds, in_flight))) == chosen


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "chosen"),
    [
        (1000, None, "012"),
        (1900, None, "01"),  # an answer of typical length ends the engine
        (1900, 100, "012"),
        (1000, 1049, "01"),  # an answer that it allows does
        (LONG, 1, "01"),
    ],
)
def test_no_request_ends_an_engine_while_another_can_serve_it(
    prompt_tokens: int, max_tokens: int | None, chosen: str
) -> None:
    request = _request(prompt_tokens, max_tokens)
    assert "".join(one.name for one in surviving(request, _pool("-bc"))) == chosen
    assert len(surviving(request, _pool("cc"))) == 2
