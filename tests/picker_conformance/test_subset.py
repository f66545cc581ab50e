"""The subset of endpoints that the data plane allows for a request."""

from __future__ import annotations

import pytest

from .data_plane import SUBSET, SUBSET_HINT
from .requirement import Source, must, should
from .target import FOREIGN, STORED, Target, destinations


@must(Source.SUBSET, "Only endpoints of the subset are picked, here of one endpoint; fallbacks are of it too.")
def test_exact(picker: Target) -> None:
    for endpoint in picker.pool():
        assert destinations(picker.post(subset=[endpoint])) == [endpoint]


@must(Source.SUBSET, "Of a subset with endpoints that the picker does not know, it picks one that it knows.")
def test_partly_known(picker: Target) -> None:
    for endpoint in picker.pool():
        assert destinations(picker.post(subset=[FOREIGN, endpoint])) == [endpoint]


@must(Source.SUBSET, "Fallbacks are of the subset too.")
def test_fallbacks(picker: Target) -> None:
    subset = picker.two_endpoints()
    for _ in range(5):
        picked = destinations(picker.post(subset=list(subset)))
        assert set(picked) <= set(subset), f"{picked} of the subset {subset}"


@must(Source.SUBSET, "A subset without any eligible endpoint gives 503.")
def test_none_known(picker: Target) -> None:
    answer = picker.post(subset=[FOREIGN])
    assert answer.immediate == 503, f"expected 503, got {answer.summary()}"


@must(Source.SUBSET, "An empty subset gives 503.")
def test_empty(picker: Target) -> None:
    answer = picker.post(subset=[])
    assert answer.immediate == 503, f"expected 503, got {answer.summary()}"


@must(Source.SUBSET, "The subset holds for requests without a body as well.")
def test_without_a_body(picker: Target) -> None:
    endpoint = picker.pool()[-1]
    assert destinations(picker.get(STORED, subset=[endpoint])) == [endpoint]


@must(Source.SUBSET, "Metadata without the key of the subset leave the whole pool.")
@pytest.mark.parametrize("metadata", [{}, {"envoy.lb.subset_hint": {"other": "value"}}, {"other": {"a": "b"}}])
def test_no_subset(picker: Target, metadata: dict[str, dict[str, object]]) -> None:
    with picker.stream() as stream:
        picker.begin(stream, metadata=metadata)
        stream.send_body(picker.chat())
        assert set(destinations(stream.request())) <= set(picker.given_pool())


@should(
    Source.USERS,
    "A subset that is one text, ip:port,ip:port, counts as the list: filters that copy headers write it so.",
)
def test_text(picker: Target) -> None:
    endpoint = picker.pool()[-1]
    with picker.stream() as stream:
        picker.begin(stream, metadata={SUBSET_HINT: {SUBSET: f"{FOREIGN},{endpoint}"}})
        stream.send_body(picker.chat())
        assert destinations(stream.request()) == [endpoint]
