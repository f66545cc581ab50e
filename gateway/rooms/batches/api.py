"""The paths of OpenAI's files and batches. Objects are found only under the id of their key, so others get 404."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError

from backends import background
from gateway.dialects.errors import GatewayError, too_large
from gateway.dialects.form import read_form
from gateway.rooms.batches.records import ENDED, ID, BatchPlace, BatchRecord, FileRecord, new_digits
from gateway.rooms.batches.run import settings_of
from gateway.rooms.batches.storage import FULL, Storage
from gateway.routing.large_bodies import check_cost

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from gateway.rooms.batches.settings import BatchesSettings

_MOST_FORM_BYTES: Final = 1 << 16
"""Size limit for a form, besides the file in it."""
_MOST_BODY_BYTES: Final = 1 << 16
_MOST_VALUES: Final = 10_000
_MOST_METADATA_BYTES: Final = 16_384
_MOST_NAME_CHARS, _MOST_LISTED, _MOST_AT_ONCE = 256, 100, 16
T = TypeVar("T")
WINDOW_S = 24 * 3600
_KEPT: Final = 10
"""Batches of a key that are kept, per batch that may be open; new ones evict the oldest."""


def most_bytes(settings: BatchesSettings) -> Mapping[str, int]:
    """Return the paths, with the largest request body of each."""
    return {"/v1/files": int(settings.max_file_mib * 2**20) + _MOST_FORM_BYTES, "/v1/batches": _MOST_BODY_BYTES}


class Asked(NamedTuple):
    """A request for one of the paths."""

    owner: str  # the id of its client, and the folder of its objects
    request: Request
    body: bytes

    @property
    def id(self) -> str:
        """The id in its path."""
        return str(self.request.path_params["id"])


def add_batches(
    app: FastAPI, gateway: Gateway, settings: BatchesSettings, storage: Storage, on_news: Callable[[], None]
) -> None:
    """Add the paths; call `on_news` when there may be something to run or to end."""
    api, at_once, bounds = BatchesApi(settings, storage), asyncio.Semaphore(_MOST_AT_ONCE), most_bytes(settings)

    async def answer(work: Callable[[Asked], object], request: Request) -> Response:
        client = gateway.relay.access.identify(request.method, dict(request.scope["headers"]))
        key = settings_of(gateway, client)
        if key is not None and not key.batches:
            text = f"Key {client.name!r} may not use files and batches: its `batches` is false in the pool file."
            raise GatewayError(403, text, code="batches_not_allowed")
        if at_once.locked():  # reject before bodies pile up
            raise GatewayError(503, "Too many ask for files at once: try again.", code="overloaded", retry_after_s=1.0)
        async with at_once:
            body = b"".join([part async for part in request.stream() if part])  # a single part is not copied
            most = next(most for path, most in bounds.items() if request.scope["path"].startswith(path))
            if len(body) > most:  # its length was not announced
                raise too_large(most)
            try:
                made = await asyncio.to_thread(work, Asked(client.id, request, body))
            except OSError as error:
                background.note("batches", error, of="a request")
                if error.errno in FULL:
                    text = "There is no room for more files and batches: delete some, or try again later."
                    raise GatewayError(507, text, code="insufficient_storage") from error
                text = "Files and batches are out of reach: try again later."
                raise GatewayError(503, text, code="storage_unavailable", retry_after_s=10.0) from error
        if request.method == "POST":
            on_news()
        return made if isinstance(made, Response) else Response(orjson.dumps(made), media_type="application/json")

    for method, path, work in (
        ("POST", "files", api.upload),
        ("GET", "files", api.files),
        ("GET", "files/{id}", api.file),
        ("DELETE", "files/{id}", api.delete),
        ("GET", "files/{id}/content", api.content),
        ("POST", "batches", api.create),
        ("GET", "batches", api.batches),
        ("GET", "batches/{id}", api.batch),
        ("POST", "batches/{id}/cancel", api.cancel),
    ):
        app.add_route(f"/v1/{path}", partial(answer, work), methods=[method], include_in_schema=False)


class NewBatch(BaseModel):
    """The body of a request for a batch."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class BatchesApi:
    """The handlers of the paths."""

    def __init__(self, settings: BatchesSettings, storage: Storage) -> None:
        self._settings = settings
        self._storage = storage

    def upload(self, asked: Asked) -> FileRecord:
        """Store a file."""
        form, mib = read_form(asked.request.headers.get("content-type", ""), asked.body), self._settings.max_file_mib
        (name, content), (_, purpose) = form.get("file", ("", b"")), form.get("purpose", ("", b""))
        _check(purpose == b"batch", "The purpose of a file is `batch` here.", "purpose")
        _check(content, "There is no file, or it is empty.", "file")
        if len(content) > mib * 2**20:
            raise GatewayError(413, f"A file has at most {mib:g} MiB.", code="file_too_large", param="file")
        if len(self._storage.names(f"{asked.owner}/files")) >= (most := self._settings.max_files_per_key):
            raise GatewayError(429, f"This key has {most} files: delete some.", code="too_many_files")
        self._storage.check_room(len(content))
        record = FileRecord(f"file-{new_digits()}", name[:_MOST_NAME_CHARS], "batch", len(content))
        self._storage.write(f"{asked.owner}/files/{record.id}", record, [content])
        return record

    def file(self, asked: Asked) -> FileRecord:
        """Return the record of a file."""
        return self._file(asked.owner, asked.id)

    def content(self, asked: Asked) -> Response:
        """Return the bytes of a file."""
        parts = self._storage.content(f"{asked.owner}/files/{self.file(asked).id}")
        return StreamingResponse(parts, media_type="application/octet-stream")

    def delete(self, asked: Asked) -> object:
        """Delete a file that no open batch needs."""
        file = self.file(asked)
        records = [self._storage.read(place.open, BatchRecord) for place in self._open(asked.owner)]
        if any(record is not None and record.input_file_id == file.id for record in records):
            raise GatewayError(409, "A batch that has not ended needs this file.", code="file_in_use")
        self._storage.remove(f"{asked.owner}/files/{file.id}")
        return {"id": file.id, "object": "file", "deleted": True}

    def files(self, asked: Asked) -> object:
        """List files."""
        query, ids = asked.request.query_params, self._storage.names(f"{asked.owner}/files")
        purpose = query.get("purpose")
        return _page(query, ids, partial(self._file, asked.owner), lambda each: purpose in {None, each.purpose})

    def create(self, asked: Asked) -> BatchRecord:
        """Create a batch."""
        for _ in check_cost(asked.body, _MOST_VALUES):
            pass
        try:
            wanted = NewBatch.model_validate_json(asked.body)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            param = ".".join(map(str, wrong["loc"]))
            raise GatewayError(
                400, f"{param or 'body'}: {wrong['msg']}.", code="invalid_request", param=param or None
            ) from None
        is_small = len(orjson.dumps(wanted.metadata)) <= _MOST_METADATA_BYTES
        _check(is_small, f"The metadata has at most {_MOST_METADATA_BYTES} bytes.", "metadata")
        owner, most = asked.owner, self._settings.max_batches_per_key
        file = self._file(owner, wanted.input_file_id)
        _check(file.purpose == "batch", "The input file needs the purpose `batch`.", "input_file_id")
        if len(self._open(owner)) >= most:
            text = f"This key has {most} batches that have not ended: wait, or cancel one."
            raise GatewayError(429, text, code="too_many_batches")
        ended = list(filter(ID.fullmatch, self._storage.names(f"{owner}/batches")))
        self._storage.remove(*(f"{owner}/batches/{batch_id}" for batch_id in ended[: -_KEPT * most]))
        self._storage.check_room()
        batch_id, now_s = f"batch_{new_digits()}", int(time.time())
        record = BatchRecord(batch_id, file.id, wanted.endpoint, wanted.metadata, now_s, now_s + WINDOW_S)
        self._storage.write(BatchPlace(owner, record.id).open, record)
        return record

    def batch(self, asked: Asked) -> BatchRecord:
        """Return the record of a batch."""
        return self._batch(asked.owner, asked.id)

    def batches(self, asked: Asked) -> object:
        """List batches."""
        ids = {*self._storage.names(f"{asked.owner}/batches"), *(place.id for place in self._open(asked.owner))}
        return _page(asked.request.query_params, ids, partial(self._batch, asked.owner))

    def cancel(self, asked: Asked) -> BatchRecord:
        """Cancel a batch."""
        record = self.batch(asked)
        if record.status in ENDED:
            raise GatewayError(409, f"This batch has ended: it is {record.status}.", code="batch_ended")
        record.enter("cancelling")
        path = f"{BatchPlace(asked.owner, asked.id).open}.cancel"
        self._storage.write(path, {"cancelling_at": record.cancelling_at})
        return record

    def _open(self, owner: str) -> set[BatchPlace]:
        """Return the places of a key's open batches."""
        places = [BatchPlace.at(f"open/{name}") for name in self._storage.names("open")]
        return {place for place in places if place is not None and place.owner == owner}

    def _file(self, owner: str, file_id: str) -> FileRecord:
        return self._found(file_id, FileRecord, f"{owner}/files/{file_id}")

    def _batch(self, owner: str, batch_id: str) -> BatchRecord:
        place = BatchPlace(owner, batch_id)
        record = self._found(batch_id, BatchRecord, place.open, place.ended)
        cancel = None if record.status in ENDED else self._storage.read(f"{place.open}.cancel", dict[str, int])
        if cancel is not None:
            record.status, record.cancelling_at = "cancelling", cancel.get("cancelling_at")
        return record

    def _found(self, name: str, kind: Callable[..., T], *paths: str) -> T:
        """Return the record at the first of the paths that has one."""
        for path in paths if ID.fullmatch(name) else ():
            if (record := self._storage.read(path, kind)) is not None:
                return record
        raise GatewayError(404, f"There is no {name[:100]!r} here.", code="not_found", param="id")


def _page(
    query: Mapping[str, str], ids: Iterable[str], read: Callable[[str], Any], is_shown: Callable[[Any], bool] = bool
) -> object:
    """Return a page of records, newest first by default, that follow the requested one."""
    ascends, after, limit = query.get("order") == "asc", query.get("after"), query.get("limit", "20")
    most = min(int(limit[:4]), _MOST_LISTED) if limit.isdecimal() else 20
    shown: list[Any] = []
    following = [each for each in ids if not after or (each > after if ascends else each < after)]  # it may be gone
    for each in sorted(following, reverse=not ascends):
        with contextlib.suppress(GatewayError):  # it cannot be read
            record = read(each)
            if is_shown(record):
                shown.append(record)
        if len(shown) > most:
            break
    page = {"object": "list", "data": shown[:most], "has_more": len(shown) > most}
    return page | ({"first_id": shown[0].id, "last_id": shown[:most][-1].id} if shown[:most] else {})


def _check(is_met: Any, text: str, param: str | None = None) -> None:
    if not is_met:
        raise GatewayError(400, text, code="invalid_request", param=param)
