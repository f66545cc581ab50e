"""The paths of OpenAI's files and batches. What a key has is found under its own id only, so others get 404."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from backends import background
from gateway.batches.bounds import settings_of
from gateway.batches.records import ENDED, ENDPOINTS, ID, Marker, batch_record, file_record, new_digits
from gateway.batches.storage import FULL, Document, Storage
from gateway.dialects.errors import GatewayError, too_large
from gateway.dialects.form import read_form
from gateway.routing.large_bodies import check_cost

if TYPE_CHECKING:
    from gateway.config.settings.batches import BatchesSettings
    from gateway.service.assembly import Gateway

_MOST_FORM_BYTES: Final = 1 << 16
"""Of a form, besides the file in it."""
_MOST_BODY_BYTES: Final = 1 << 16
_MOST_VALUES: Final = 10_000
_MOST_NAME_CHARS: Final = 256
_MOST_METADATA_BYTES: Final = 16_384
_MOST_LISTED: Final = 100
_MOST_AT_ONCE: Final = 16
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
            asked = Asked(client.id, asked_id, request.query_params, content_type, body)
            try:
                made = await asyncio.to_thread(work, asked)
            except GatewayError:
                raise
            except Exception as error:
                raise _storage_failed(error) from error
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


def _storage_failed(error: Exception) -> GatewayError:
    """Return the error for what could not be read or written."""
    background.note("batches", error, of="a request")
    if isinstance(error, OSError) and error.errno in FULL:
        text = "There is no room for more files and batches: delete some, or try again later."
        return GatewayError(507, text, code="insufficient_storage")
    text = "Files and batches are out of reach: try again later."
    return GatewayError(503, text, code="storage_unavailable", retry_after_s=10.0)


class BatchesApi:
    """What the paths do."""

    def __init__(self, settings: BatchesSettings, storage: Storage) -> None:
        self._settings = settings
        self._storage = storage

    def upload(self, asked: Asked) -> Document:
        """Keep a file."""
        form = read_form(asked.content_type, asked.body)
        if bytes(form.get("purpose", ("", b""))[1]) != b"batch":
            raise _invalid("The purpose of a file is `batch` here.", "purpose")
        name, content = form.get("file", ("", b""))
        if not content:
            raise _invalid("There is no file, or it is empty.", "file")
        if len(content) > self._settings.max_file_mib * 2**20:
            text = f"A file has at most {self._settings.max_file_mib:g} MiB."
            raise GatewayError(413, text, code="file_too_large", param="file")
        folder, most = f"{asked.owner}/files", self._settings.max_files_per_key
        if sum(each.endswith(".json") for each in self._storage.names(folder)) >= most:
            raise GatewayError(429, f"This key has {most} files: delete some.", code="too_many_files")
        self._storage.check_room(len(content))
        file_id = f"file-{new_digits()}"
        record = file_record(file_id, len(content), name[:_MOST_NAME_CHARS], "batch")
        with self._whole(f"{folder}/{file_id}.jsonl"):
            self._storage.write(f"{folder}/{file_id}.jsonl", [content])
            self._storage.write_json(f"{folder}/{file_id}.json", record)
        return record

    @contextlib.contextmanager
    def _whole(self, path: str) -> Iterator[None]:
        """Remove what was written if not all of it can be."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self._storage.remove(path)
            raise

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
        folder, purpose = f"{asked.owner}/files", asked.query.get("purpose")
        names = [name.removesuffix(".json") for name in self._storage.names(folder) if name.endswith(".json")]
        ids = sorted((name for name in names if ID.fullmatch(name)), key=lambda name: name[5:])
        read = (self._read(f"{folder}/{each}.json", each, "purpose") for each in _following(ids, asked.query))
        return _page((each for each in read if each and purpose in {None, each["purpose"]}), asked.query)

    def create(self, asked: Asked) -> Document:
        """Begin a batch."""
        try:
            for _ in check_cost(asked.body, _MOST_VALUES):
                pass
            fields = orjson.loads(asked.body)
        except orjson.JSONDecodeError as error:
            raise _invalid("The body is not JSON.") from error
        if not isinstance(fields, dict):
            raise _invalid("The body is not a JSON object.")
        metadata, owner, most = fields.get("metadata"), asked.owner, self._settings.max_batches_per_key
        if fields.get("endpoint") not in [*ENDPOINTS]:
            raise _invalid(f"The endpoint of a batch is one of {', '.join(ENDPOINTS)}.", "endpoint")
        if fields.get("completion_window") != "24h":
            raise _invalid("The completion_window of a batch is `24h`.", "completion_window")
        is_flat = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        if metadata is not None and not (is_flat and len(orjson.dumps(metadata)) <= _MOST_METADATA_BYTES):
            text = f"The metadata is an object whose values are texts, of at most {_MOST_METADATA_BYTES} bytes."
            raise _invalid(text, "metadata")
        asked_id = fields.get("input_file_id")
        file_id = asked_id if isinstance(asked_id, str) else ""
        if self.file(asked._replace(id=file_id))["purpose"] != "batch":
            raise _invalid("The input file needs the purpose `batch`.", "input_file_id")
        is_open = self._open(owner)
        if len(is_open) >= most:
            text = f"This key has {most} batches that have not ended: wait, or cancel one."
            raise GatewayError(429, text, code="too_many_batches")
        open_ids = {marker.batch_id for marker in is_open}
        for batch_id in self._batch_ids(owner)[: -_KEPT * most]:
            if batch_id not in open_ids:
                self._storage.remove(f"{owner}/batches/{batch_id}")
        self._storage.check_room(0)
        marker = Marker(owner, f"batch_{new_digits()}", file_id)
        record = batch_record(marker, fields["endpoint"], metadata, WINDOW_S)
        with self._whole(marker.folder):
            self._storage.write_json(f"{marker.folder}/batch.json", record)
            self._storage.write(marker.path, [])
        return record

    def batch(self, asked: Asked) -> Document:
        """Return what is told of a batch."""
        record = self._found(f"{asked.owner}/batches/{asked.id}/batch.json", asked.id, "status")
        marker = Marker(asked.owner, asked.id, str(record.get("input_file_id")))
        cancel = None if record["status"] in ENDED else self._storage.read(marker.cancel_path)
        return record if cancel is None else record | cancel | {"status": "cancelling"}

    def batches(self, asked: Asked) -> Document:
        """List batches."""
        ids = _following(self._batch_ids(asked.owner), asked.query)
        return _page(self._batches(asked, ids), asked.query)

    def _batches(self, asked: Asked, ids: list[str]) -> Iterator[Document]:
        for each in ids:
            with contextlib.suppress(GatewayError):  # one that cannot be read
                yield self.batch(asked._replace(id=each))

    def cancel(self, asked: Asked) -> Document:
        """Have a batch end."""
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
        record = self._read(path, name, field) if ID.fullmatch(name) else None
        if record is None:
            raise GatewayError(404, f"There is no {name[:100]!r} here.", code="not_found", param="id")
        return record

    def _read(self, path: str, name: str, field: str) -> Document | None:
        """Return a record with a field that is a text; None if there is none, or something else is in its place."""
        record = self._storage.read(path)
        if record is not None and not (record.get("id") == name and isinstance(record.get(field), str)):
            self._storage.set_aside(path, f"it is no record of {name}")
            return None
        return record


def _following(ids: list[str], query: Mapping[str, str]) -> list[str]:
    """Return what a list goes through: the newest first, after that which was asked for."""
    ids, after = ids if query.get("order") == "asc" else ids[::-1], query.get("after")
    return ids[ids.index(after) + 1 :] if after in ids else ids


def _page(records: Iterator[Document], query: Mapping[str, str]) -> Document:
    limit = query.get("limit", "20")
    most = min(int(limit[:4]), _MOST_LISTED) if limit.isdecimal() else 20
    shown = list(islice(records, most + 1))
    page: Document = {"object": "list", "data": shown[:most], "has_more": len(shown) > most}
    return page | ({"first_id": shown[0]["id"], "last_id": shown[:most][-1]["id"]} if page["data"] else {})


def _invalid(text: str, param: str | None = None) -> GatewayError:
    return GatewayError(400, text, code="invalid_request", param=param)
