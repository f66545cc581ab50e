"""The paths of OpenAI's files and batches. What a key has is found under its own name only, so others get 404."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from gateway.batches.multipart import read_form
from gateway.batches.records import ENDED, ENDPOINTS, Document, file_record, new_batch
from gateway.batches.storage import Storage
from gateway.dialects.errors import GatewayError

if TYPE_CHECKING:
    from gateway.config.settings.batches import BatchesSettings
    from gateway.service.assembly import Gateway

_ID: Final = re.compile(r"(?:file-[0-9a-f]{32}(?:-output|-error)?|batch_[0-9a-f]{32})")
_KEPT: Final = 10
"""Batches of a key that are kept, for each that may be open; the oldest make room for new ones."""
_MOST_UPLOADS: Final = 8
_MOST_LISTED: Final = 100
_MOST_METADATA_BYTES: Final = 16_384


T = TypeVar("T")


class BatchesApi:
    """What the paths do; all of it waits for the storage, in threads."""

    def __init__(self, settings: BatchesSettings, storage: Storage) -> None:
        self._settings = settings
        self._storage = storage

    # Files

    def upload(self, client: str, content_type: str, body: bytes) -> Document:
        """Keep a file."""
        form = read_form(content_type, body)
        if "purpose" not in form or bytes(form["purpose"].content) != b"batch":
            raise _invalid("The purpose of a file is `batch` here.", "purpose")
        if "file" not in form or not form["file"].content:
            raise _invalid("There is no file, or it is empty.", "file")
        name, content = form["file"]
        if len(content) > self._settings.max_file_mib * 2**20:
            text = f"A file has at most {self._settings.max_file_mib:g} MiB."
            raise GatewayError(413, text, code="file_too_large", param="file")
        folder, most = f"{_owner(client)}/files", self._settings.max_files_per_key
        if len(_ids(self._storage, folder)) >= most:
            raise GatewayError(429, f"This key has {most} files: delete some.", code="too_many_files")
        file_id = f"file-{_new_digits()}"
        self._storage.write(f"{folder}/{file_id}.jsonl", [content])
        record = file_record(file_id, len(content), name, "batch")
        self._storage.write_json(f"{folder}/{file_id}.json", record)
        return record

    def file(self, client: str, file_id: str) -> Document:
        """Return what is told of a file."""
        return self._found(f"{_owner(client)}/files/{file_id}.json", file_id)

    def delete(self, client: str, file_id: str) -> Document:
        """Delete a file."""
        self.file(client, file_id)
        path = f"{_owner(client)}/files/{file_id}"
        self._storage.remove(f"{path}.json", f"{path}.jsonl")
        return {"id": file_id, "object": "file", "deleted": True}

    def content(self, client: str, file_id: str) -> Iterator[bytes]:
        """Return the bytes of a file."""
        self.file(client, file_id)
        return self._storage.chunks(f"{_owner(client)}/files/{file_id}.jsonl")

    def files(self, client: str, query: Mapping[str, str]) -> Document:
        """List files."""
        folder, purpose = f"{_owner(client)}/files", query.get("purpose")
        read = (
            self._storage.read(f"{folder}/{file_id}.json") for file_id in _listed(_ids(self._storage, folder), query)
        )
        return _page((each for each in read if each and purpose in {None, each["purpose"]}), query)

    # Batches

    def create(self, client: str, body: bytes) -> Document:
        """Begin a batch."""
        try:
            asked = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise _invalid("The body is not JSON.") from error
        if not isinstance(asked, dict):
            raise _invalid("The body is a JSON object.")
        if asked.get("endpoint") not in ENDPOINTS:
            raise _invalid(f"The endpoint of a batch is one of {', '.join(ENDPOINTS)}.", "endpoint")
        if asked.get("completion_window") != "24h":
            raise _invalid("The completion_window of a batch is `24h`.", "completion_window")
        metadata = asked.get("metadata")
        if not isinstance(metadata, dict | None) or len(orjson.dumps(metadata)) > _MOST_METADATA_BYTES:
            raise _invalid(f"The metadata is an object of at most {_MOST_METADATA_BYTES} bytes.", "metadata")
        owner, most = _owner(client), self._settings.max_batches_per_key
        file_id = str(asked.get("input_file_id"))
        if self.file(client, file_id)["purpose"] != "batch":
            raise _invalid("The input file needs the purpose `batch`.", "input_file_id")
        is_open = {name.split(".")[1] for name in self._storage.names("open") if name.startswith(owner)}
        if len(is_open) >= most:
            text = f"This key has {most} batches that have not ended: wait, or cancel one."
            raise GatewayError(429, text, code="too_many_batches")
        for batch_id in self._storage.names(f"{owner}/batches")[: -_KEPT * most]:
            if batch_id not in is_open:
                self._storage.remove(f"{owner}/batches/{batch_id}")
        record = new_batch(f"batch_{_new_digits()}", asked["endpoint"], file_id, metadata)
        batch_id, times = record["id"], {name: record[name] for name in ("created_at", "expires_at")}
        self._storage.write_json(f"{owner}/batches/{batch_id}/batch.json", record)
        self._storage.write_json(f"open/{owner}.{batch_id}", {"id": batch_id, "client": client, "owner": owner} | times)
        return record

    def batch(self, client: str, batch_id: str) -> Document:
        """Return what is told of a batch."""
        record, owner = self._found(f"{_owner(client)}/batches/{batch_id}/batch.json", batch_id), _owner(client)
        marker = None if record["status"] in ENDED else self._storage.read(f"open/{owner}.{batch_id}.cancel")
        return record if marker is None else record | marker | {"status": "cancelling"}

    def batches(self, client: str, query: Mapping[str, str]) -> Document:
        """List batches."""
        ids = _listed(self._storage.names(f"{_owner(client)}/batches"), query)
        return _page((self.batch(client, batch_id) for batch_id in ids), query)

    def cancel(self, client: str, batch_id: str) -> Document:
        """Have a batch end."""
        record = self.batch(client, batch_id)
        if record["status"] in ENDED:
            raise GatewayError(409, f"This batch has ended: it is {record['status']}.", code="batch_ended")
        if record["status"] != "cancelling":
            marker = {"cancelling_at": int(time.time())}
            self._storage.write_json(f"open/{_owner(client)}.{batch_id}.cancel", marker)
            record |= marker | {"status": "cancelling"}
        return record

    def _found(self, path: str, name: str) -> Document:
        record = self._storage.read(path) if _ID.fullmatch(name) else None
        if record is None:
            raise GatewayError(404, f"There is no {name[:100]!r} here.", code="not_found", param="id")
        return record


def _owner(client: str) -> str:
    """Return the folder of a key."""
    return hashlib.sha256(client.encode()).hexdigest()[:32]


def _new_digits() -> str:
    """Return 32 hex digits that nobody can guess, in the order of time."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def _ids(storage: Storage, folder: str) -> list[str]:
    return [name.removesuffix(".json") for name in storage.names(folder) if name.endswith(".json")]


def _listed(ids: list[str], query: Mapping[str, str]) -> list[str]:
    """Return the ids that a list goes through: the newest first, from that on which it was asked to follow."""
    ids = sorted(ids, key=lambda name: name.partition("_")[2] or name.partition("-")[2])
    ids = ids if query.get("order") == "asc" else ids[::-1]
    after = query.get("after")
    return ids[ids.index(after) + 1 :] if after in ids else ids


def _page(records: Iterator[Document], query: Mapping[str, str]) -> Document:
    limit = query.get("limit", "20")
    most = min(int(limit), _MOST_LISTED) if limit.isdecimal() else 20
    page = list(islice(records, most + 1))
    shown = page[:most]
    first_and_last = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": len(page) > most} | first_and_last


def _invalid(text: str, param: str | None = None) -> GatewayError:
    return GatewayError(400, text, code="invalid_request", param=param)


def batches_router(
    gateway: Gateway, settings: BatchesSettings, storage: Storage, on_news: Callable[[], None]
) -> APIRouter:
    """Return the paths; `on_news` is called when there may be something to run."""
    api, router, uploads = BatchesApi(settings, storage), APIRouter(prefix="/v1", include_in_schema=False), set[str]()

    async def done(work: Callable[..., T], request: Request, *arguments: object) -> T:
        client = gateway.relay.access.identify(request.method, dict(request.scope["headers"])).name
        return await asyncio.to_thread(work, client, *arguments)

    @router.post("/files")
    async def upload(request: Request) -> Document:
        if len(uploads) == _MOST_UPLOADS:
            raise GatewayError(503, "Others upload files at present: try again.", code="overloaded", retry_after_s=1.0)
        uploads.add(token := _new_digits())
        try:
            content_type = request.headers.get("content-type", "")
            return await done(api.upload, request, content_type, await request.body())
        finally:
            uploads.remove(token)

    @router.get("/files")
    async def files(request: Request) -> Document:
        return await done(api.files, request, request.query_params)

    @router.get("/files/{file_id}")
    async def file(request: Request, file_id: str) -> Document:
        return await done(api.file, request, file_id)

    @router.delete("/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Document:
        return await done(api.delete, request, file_id)

    @router.get("/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        return StreamingResponse(await done(api.content, request, file_id), media_type="application/octet-stream")

    @router.post("/batches")
    async def create(request: Request) -> Document:
        record = await done(api.create, request, await request.body())
        on_news()
        return record

    @router.get("/batches")
    async def batches(request: Request) -> Document:
        return await done(api.batches, request, request.query_params)

    @router.get("/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> Document:
        return await done(api.batch, request, batch_id)

    @router.post("/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Document:
        record = await done(api.cancel, request, batch_id)
        on_news()
        return record

    return router
