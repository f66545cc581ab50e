"""Documents: consecutive versions, limited history, and restoring what a store lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from backends import background
from gateway.state.documents import VERSIONS_KEPT, Conflict, Documents, put_version
from gateway.state.redis import RedisStore
from gateway.state.store import Entry, StateError, Store
from tests.gateway.state.conftest import Stores
from tests.support.redis_server import RedisServer


class Reader:
    """The documents of one process, with the store called directly."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.documents = Documents(self.ask)
        self.seen: list[tuple[int, str]] = []
        self.documents.watch("m/rules", lambda document: self.seen.append((document.version, document.text)))

    def ask(self, job: Callable[[Store], None]) -> Awaitable[None]:
        async def call() -> None:
            job(self.store)

        return call()

    def refresh(self) -> None:
        self.documents.settle(self.documents.refresh(self.store, self.store.stamps()))

    def texts(self) -> list[str]:
        return [document.text for document in self.documents.history("m/rules")]


@pytest.fixture
def readers(stores: Stores) -> tuple[Reader, Reader]:
    return Reader(stores.open()), Reader(stores.open())


async def test_a_new_version_reaches_every_watcher(readers: tuple[Reader, Reader]) -> None:
    writer, reader = readers
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


async def test_a_document_of_another_program_keeps_no_other_from_being_read(
    readers: tuple[Reader, Reader], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_logged", background.Seldom())
    writer, reader = readers
    writer.store.commit({}, {"document/m/pin": Entry("foreign", b'{"a": 1}')})
    await writer.documents.put("m/rules", "one", after=0)
    for _ in range(2):
        reader.refresh()
    assert reader.texts() == ["one"]
    assert caplog.text.count("m/pin was not written by the gateway") == 1
    with pytest.raises(StateError, match="m/pin"):
        await writer.documents.put("m/pin", "mine", after=0)


async def test_the_second_of_two_concurrent_changes_conflicts(readers: tuple[Reader, Reader]) -> None:
    writer, other = readers
    await writer.documents.put("m/rules", "one", after=0)
    with pytest.raises(Conflict) as caught:
        await other.documents.put("m/rules", "another", after=0)
    assert caught.value.version == 1
    with pytest.raises(Conflict):
        await other.documents.put("m/new", "too high", after=3)
    other.refresh()
    assert other.texts() == ["one"]


async def test_only_the_latest_versions_are_kept(readers: tuple[Reader, Reader]) -> None:
    writer, reader = readers
    for version in range(VERSIONS_KEPT + 5):
        await writer.documents.put("m/rules", f"text {version}", after=version)
    reader.refresh()
    assert [document.version for document in reader.documents.history("m/rules")] == list(range(6, VERSIONS_KEPT + 6))
    assert writer.documents.history("m/rules") == reader.documents.history("m/rules")


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_store_that_is_wiped_or_reset_gets_all_versions_back(
    stores: Stores, readers: tuple[Reader, Reader], kept: int
) -> None:
    writer, reader = readers
    for version, text in enumerate(["one", "two", "three"]):
        await writer.documents.put("m/rules", text, after=version)
    reader.refresh()
    versions = writer.documents.history("m/rules")[:kept]
    stores.wipe()
    if versions:
        put_version(stores.open(), *versions)
    writer.refresh()
    reader.refresh()
    late = Reader(stores.open())
    late.refresh()
    assert late.texts() == writer.texts() == reader.texts() == ["one", "two", "three"]
    assert late.seen == [(3, "three")]
    assert writer.seen == [(1, "one"), (2, "two"), (3, "three")]
    await late.documents.put("m/rules", "four", after=3)


async def test_documents_survive_the_loss_of_single_keys(redis: RedisServer) -> None:
    reader = Reader(RedisStore(redis.url, "test"))
    await reader.documents.put("m/rules", "one", after=0)
    for key in ("test:index", "test:document/m/rules"):
        reader.refresh()
        redis.client.delete(key)
        reader.refresh()
        late = Reader(RedisStore(redis.url, "test"))
        for each in (late, reader, late):
            each.refresh()
        assert late.texts() == ["one"], key
        late.store.close()
    reader.store.close()
