"""The paths of OpenAI's files and batches. What a key has is found under its own id only, so others get 404."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from backends import background
from gateway.dialects.errors import GatewayError, too_large
from gateway.dialects.form import read_form
from gateway.rooms.batches.records import ENDED, ENDPOINTS, ID, Marker, batch_record, keep_file, new_digits
from gateway.rooms.batches.run import settings_of
from gateway.rooms.batches.storage import FULL, Document, Storage
from gateway.routing.large_bodies import check_cost

if TYPE_CHECKING:
    from gateway.config.settings.batches import BatchesSettings
    from gateway.gateway import Gateway

_MOST_FORM_BYTES: Final = 1 << 16
"""Of a form, besides the file in it."""
_MOST_BODY_BYTES: Final = 1 << 16
_MOST_VALUES: Final = 10_000
_MOST_METADATA_BYTES: Final = 16_384
_MOST_NAME_CHARS, _MOST_LISTED, _MOST_AT_ONCE = 256, 100, 16
WINDOW_S = 24 * 3600
_KEPT: Final = 10
"""Batches of a key that are kept, for each that may be open; the oldest make room for new ones."""


def most_bytes(settings: BatchesSettings) -> Mapping[str, int]:
    """Return the paths, with the largest body of a request for each."""
    return {"/v1/files": int(settings.max_file_mib * 2**20) + _MOST_FORM_BYTES, "/v1/batches": _MOST_BODY_BYTES}


class Asked(NamedTuple):
    """A request for one of the paths."""

    owner: str  # the id of its client, and the folder of what that has
    id: str  # in its path; empty if there is none
    query: Mapping[str, str]
    content_type: str
    body: bytes


def add_batches(
    app: FastAPI, gateway: Gateway, settings: BatchesSettings, storage: Storage, on_news: Callable[[], None]
) -> None:
    """Add the paths; `on_news` is called when there may be something to run, or to end."""
    api, at_once, bounds = BatchesApi(settings, storage), asyncio.Semaphore(_MOST_AT_ONCE), most_bytes(settings)

    async def answer(work: Callable[[Asked], Document | Response], request: Request) -> Response:
        client = gateway.relay.access.identify(request.method, dict(request.scope["headers"]))
        key = settings_of(gateway, client)
        if key is not None and not key.batches:
            text = f"Key {client.name!r} may not use files and batches: its `batches` is false in the pool file."
            raise GatewayError(403, text, code="batches_not_allowed")
        if at_once.locked():  # before bodies pile up
            raise GatewayError(503, "Too many ask for files at once: try again.", code="overloaded", retry_after_s=1.0)
        async with at_once:
            body = b"".join([part async for part in request.stream() if part])  # it is one: nothing is copied
            most = next(most for path, most in bounds.items() if request.scope["path"].startswith(path))
            if len(body) > most:  # one whose length was not announced
                raise too_large(most)
            asked_id, content_type = request.path_params.get("id", ""), request.headers.get("content-type", "")
            try:
                made = await asyncio.to_thread(
                    work, Asked(client.id, asked_id, request.query_params, content_type, body)
                )
            except GatewayError:
                raise
            except Exception as error:
                background.note("batches", error, of="a request")
                if isinstance(error, OSError) and error.errno in FULL:
                    text = "There is no room for more files and batches: delete some, or try again later."
                    raise GatewayError(507, text, code="insufficient_storage") from error
                text = "Files and batches are out of reach: try again later."
                raise GatewayError(503, text, code="storage_unavailable", retry_after_s=10.0) from error
        if request.method == "POST":
            on_news()
        return made if isinstance(made, Response) else JSONResponse(made)

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


class BatchesApi:
    """What the paths do."""

    def __init__(self, settings: BatchesSettings, storage: Storage) -> None:
        self._settings = settings
        self._storage = storage

    def upload(self, asked: Asked) -> Document:
        """Keep a file."""
        form, mib = read_form(asked.content_type, asked.body), self._settings.max_file_mib
        name, content = form.get("file", ("", b""))
        _check(
            bytes(form.get("purpose", ("", b""))[1]) == b"batch", "The purpose of a file is `batch` here.", "purpose"
        )
        _check(content, "There is no file, or it is empty.", "file")
        if len(content) > mib * 2**20:
            raise GatewayError(413, f"A file has at most {mib:g} MiB.", code="file_too_large", param="file")
        folder, most = f"{asked.owner}/files", self._settings.max_files_per_key
        if sum(each.endswith(".json") for each in self._storage.names(folder)) >= most:
            raise GatewayError(429, f"This key has {most} files: delete some.", code="too_many_files")
        self._storage.check_room(len(content))
        path = f"{folder}/file-{new_digits()}"
        return keep_file(self._storage, path, [content], name[:_MOST_NAME_CHARS], "batch") or {}

    def file(self, asked: Asked) -> Document:
        """Return what is told of a file."""
        return self._found(f"{asked.owner}/files/{asked.id}.json", asked.id, "purpose")

    def content(self, asked: Asked) -> Response:
        """Return the bytes of a file."""
        path = f"{asked.owner}/files/{self.file(asked)['id']}.jsonl"
        return StreamingResponse(self._storage.chunks(path), media_type="application/octet-stream")

    def delete(self, asked: Asked) -> Document:
        """Delete a file that no open batch needs."""
        path = f"{asked.owner}/files/{self.file(asked)['id']}"
        if any(marker.file_id == asked.id for marker in self._open(asked.owner)):
            raise GatewayError(409, "A batch that has not ended needs this file.", code="file_in_use")
        self._storage.remove(f"{path}.json", f"{path}.jsonl")
        return {"id": asked.id, "object": "file", "deleted": True}

    def files(self, asked: Asked) -> Document:
        """List files."""
        names, purpose = self._storage.names(f"{asked.owner}/files"), asked.query.get("purpose")
        ids = sorted((name[:-5] for name in names if ID.fullmatch(name.removesuffix(".json"))), key=lambda id_: id_[5:])
        return _page(asked, ids, self.file, lambda record: purpose in {None, record["purpose"]})

    def create(self, asked: Asked) -> Document:
        """Begin a batch."""
        try:
            for _ in check_cost(asked.body, _MOST_VALUES):
                pass
            fields = orjson.loads(asked.body)
        except orjson.JSONDecodeError:
            fields = None
        _check(isinstance(fields, dict), "The body is not a JSON object.")
        metadata, owner, most = fields.get("metadata"), asked.owner, self._settings.max_batches_per_key
        endpoint, file_id = fields.get("endpoint"), fields.get("input_file_id")
        is_flat = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        is_small = metadata is None or (is_flat and len(orjson.dumps(metadata)) <= _MOST_METADATA_BYTES)
        _check(endpoint in [*ENDPOINTS], f"The endpoint of a batch is one of {', '.join(ENDPOINTS)}.", "endpoint")
        _check(
            fields.get("completion_window") == "24h", "The completion_window of a batch is `24h`.", "completion_window"
        )
        text = f"The metadata is an object whose values are texts, of at most {_MOST_METADATA_BYTES} bytes."
        _check(is_small, text, "metadata")
        file = self.file(asked._replace(id=file_id if isinstance(file_id, str) else ""))
        _check(file["purpose"] == "batch", "The input file needs the purpose `batch`.", "input_file_id")
        open_ids = {marker.batch_id for marker in self._open(owner)}
        if len(open_ids) >= most:
            text = f"This key has {most} batches that have not ended: wait, or cancel one."
            raise GatewayError(429, text, code="too_many_batches")
        for batch_id in self._batch_ids(owner)[: -_KEPT * most]:
            if batch_id not in open_ids:
                self._storage.remove(f"{owner}/batches/{batch_id}")
        self._storage.check_room(0)
        marker = Marker(owner, f"batch_{new_digits()}", file["id"])
        record = batch_record(marker, endpoint, metadata, WINDOW_S)
        try:
            self._storage.write_json(f"{marker.folder}/batch.json", record)
            self._storage.write(marker.path, [])
        except OSError:
            self._storage.remove(marker.folder)
            raise
        return record

    def batch(self, asked: Asked) -> Document:
        """Return what is told of a batch."""
        record = self._found(f"{asked.owner}/batches/{asked.id}/batch.json", asked.id, "status")
        marker = Marker(asked.owner, asked.id, str(record.get("input_file_id")))
        cancel = None if record["status"] in ENDED else self._storage.read(marker.cancel_path)
        return record if cancel is None else record | cancel | {"status": "cancelling"}

    def batches(self, asked: Asked) -> Document:
        """List batches."""
        return _page(asked, self._batch_ids(asked.owner), self.batch, bool)

    def cancel(self, asked: Asked) -> Document:
        """End a batch."""
        record = self.batch(asked)
        if record["status"] in ENDED:
            raise GatewayError(409, f"This batch has ended: it is {record['status']}.", code="batch_ended")
        fields = {"cancelling_at": record.get("cancelling_at") or int(time.time())}
        self._storage.write_json(Marker(asked.owner, asked.id, record["input_file_id"]).cancel_path, fields)
        return record | fields | {"status": "cancelling"}

    def _open(self, owner: str) -> list[Marker]:
        """Return the markers of a key's open batches."""
        markers = map(Marker.read, self._storage.names("open"))
        return [marker for marker in markers if marker is not None and marker.owner == owner]

    def _batch_ids(self, owner: str) -> list[str]:
        return [name for name in self._storage.names(f"{owner}/batches") if ID.fullmatch(name)]

    def _found(self, path: str, name: str, field: str) -> Document:
        """Return a record with a field that is a text; what else may be in its place is set aside."""
        record = self._storage.read(path) if ID.fullmatch(name) else None
        if record is not None and not (record.get("id") == name and isinstance(record.get(field), str)):
            self._storage.set_aside(path, f"it is no record of {name}")
            record = None
        if record is None:
            raise GatewayError(404, f"There is no {name[:100]!r} here.", code="not_found", param="id")
        return record


def _page(
    asked: Asked, ids: list[str], read: Callable[[Asked], Document], is_shown: Callable[[Document], bool]
) -> Document:
    """Return a list of records, the newest first, after that which was asked for."""
    ids, after, limit = (
        ids if asked.query.get("order") == "asc" else ids[::-1],
        asked.query.get("after"),
        asked.query.get("limit", "20"),
    )

    def records() -> Iterator[Document]:
        for each in ids[ids.index(after) + 1 :] if after in ids else ids:
            try:
                record = read(asked._replace(id=each))
            except GatewayError:  # it cannot be read
                continue
            if is_shown(record):
                yield record

    most = min(int(limit[:4]), _MOST_LISTED) if limit.isdecimal() else 20
    shown = list(islice(records(), most + 1))
    page: Document = {"object": "list", "data": shown[:most], "has_more": len(shown) > most}
    return page | ({"first_id": shown[0]["id"], "last_id": shown[:most][-1]["id"]} if page["data"] else {})


def _check(is_met: Any, text: str, param: str | None = None) -> None:
    if not is_met:
        raise GatewayError(400, text, code="invalid_request", param=param)
