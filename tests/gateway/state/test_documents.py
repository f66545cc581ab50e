"""Documents: only the next version is taken, all are kept, and what a store lost comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gateway.state.documents import Documents
from gateway.state.store import VERSIONS_KEPT, Conflict, Document, Store
from tests.gateway.state.conftest import Place


class Reader:
    """The documents of one process, without a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.documents = Documents(self.ask)
        self.seen: list[tuple[int, str]] = []
        self.documents.watch("m/rules", lambda document: self.seen.append((document.version, document.text)))

    def ask(self, job: Callable[[Store], None]) -> Awaitable[None]:
        async def done() -> None:
            job(self.store)

        return done()

    def refresh(self) -> None:
        self.documents.settle(self.documents.refresh(self.store))

    def texts(self) -> list[str]:
        return [document.text for document in self.documents.history("m/rules")]


@pytest.fixture
def two(place: Place) -> tuple[Reader, Reader]:
    return Reader(place.store()), Reader(place.store())


async def test_a_new_version_reaches_whoever_watches(two: tuple[Reader, Reader]) -> None:
    writer, reader = two
    first = await writer.documents.put("m/rules", "one", after=0)
    assert (first.version, writer.seen) == (1, [(1, "one")])
    reader.refresh()
    await reader.documents.put("m/rules", "zwei: ü\n", after=1)
    writer.refresh()
    writer.refresh()
    assert writer.seen == reader.seen == [(1, "one"), (2, "zwei: ü\n")]
    assert writer.documents.history("m/rules") == reader.documents.history("m/rules")
    assert writer.documents.get("m/rules") == reader.documents.history("m/rules")[-1]
    assert writer.documents.get("m/other") is None


async def test_of_two_that_change_the_same_version_one_is_told(two: tuple[Reader, Reader]) -> None:
    writer, other = two
    await writer.documents.put("m/rules", "one", after=0)
    with pytest.raises(Conflict) as caught:
        await other.documents.put("m/rules", "another", after=0)
    assert caught.value.version == 1
    with pytest.raises(Conflict):
        await other.documents.put("m/new", "too high", after=3)
    other.refresh()
    assert other.texts() == ["one"]


async def test_only_the_latest_versions_are_kept(two: tuple[Reader, Reader]) -> None:
    writer, reader = two
    for version in range(VERSIONS_KEPT + 5):
        await writer.documents.put("m/rules", f"text {version}", after=version)
    reader.refresh()
    assert [one.version for one in reader.documents.history("m/rules")] == list(range(6, VERSIONS_KEPT + 6))
    assert writer.documents.history("m/rules") == reader.documents.history("m/rules")


async def test_a_wiped_store_gets_them_back(place: Place, two: tuple[Reader, Reader]) -> None:
    writer, reader = two
    for version, text in enumerate(["one", "two", "three"]):
        await writer.documents.put("m/rules", text, after=version)
    reader.refresh()
    place.wipe()
    writer.refresh()
    reader.refresh()
    late = Reader(place.store())
    late.refresh()
    assert late.texts() == writer.texts() == reader.texts() == ["one", "two", "three"]
    assert late.seen == [(3, "three")]
    await late.documents.put("m/rules", "four", after=3)


async def test_a_store_that_was_set_back_gets_the_end_again(place: Place, two: tuple[Reader, Reader]) -> None:
    writer, reader = two
    for version, text in enumerate(["one", "two", "three"]):
        await writer.documents.put("m/rules", text, after=version)
    reader.refresh()
    kept = writer.documents.history("m/rules")[:1]
    place.wipe()
    place.store().restore(kept)
    reader.refresh()
    writer.refresh()
    assert [one.text for one in place.store().history("m/rules")] == ["one", "two", "three"]
    assert writer.seen == [(1, "one"), (2, "two"), (3, "three")]


async def test_what_was_written_to_a_wiped_store_holds(place: Place, two: tuple[Reader, Reader]) -> None:
    writer, reader = two
    for version, text in enumerate(["one", "two"]):
        await writer.documents.put("m/rules", text, after=version)
    reader.refresh()
    place.wipe()
    place.store().put(Document("m/rules", 1, "begun again", 5.0))
    reader.refresh()
    writer.refresh()
    assert reader.texts() == writer.texts() == ["begun again"]
    assert reader.seen == [(2, "two"), (1, "begun again")]


async def test_the_same_version_of_another_text_is_seen_after_trouble(place: Place) -> None:
    reader = Reader(place.store())
    await reader.documents.put("m/rules", "one", after=0)
    place.wipe()
    place.store().put(Document("m/rules", 1, "begun again", 5.0))
    reader.documents.read_again()
    reader.refresh()
    assert reader.texts() == ["begun again"]
