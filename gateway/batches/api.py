"""The paths of OpenAI's files and batches. What a key has is found under its own name only, so others get 404."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gateway.batches.run import ENDED, file_record
from gateway.batches.storage import Document, Storage
from gateway.dialects.errors import GatewayError

if TYPE_CHECKING:
    from gateway.config.settings.batches import BatchesSettings
    from gateway.service.assembly import Gateway

_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_ID: Final = re.compile(r"(?:file-[0-9a-f]{32}(?:-output|-error)?|batch_[0-9a-f]{32})")
_BOUNDARY: Final = re.compile(r'multipart/form-data;.*\bboundary="?([^";,]{1,70})')
_FIELD: Final = re.compile(rb'content-disposition: form-data; name="(\w+)"(?:; filename="([^"]*)")?', re.IGNORECASE)
_MOST_FIELDS: Final = 16
_MOST_METADATA_BYTES: Final = 16_384
_MOST_LISTED: Final = 100
_MOST_AT_ONCE: Final = 16
WINDOW_S = 24 * 3600
_KEPT: Final = 10
"""Batches of a key that are kept, for each that may be open; the oldest make room for new ones."""


class Asked(NamedTuple):
    """A request for one of the paths."""

    owner: str  # the folder of its key
    client: str
    id: str  # in its path; empty if there is none
    query: Mapping[str, str]
    content_type: str
    body: bytes


def add_batches(
    app: FastAPI, gateway: Gateway, settings: BatchesSettings, storage: Storage, on_news: Callable[[], None]
) -> None:
    """Add the paths; `on_news` is called when there may be something to run."""
    api, at_once = BatchesApi(settings, storage), asyncio.Semaphore(_MOST_AT_ONCE)

    async def answer(work: Callable[[Asked], Document | Response], request: Request) -> Response:
        if at_once.locked():  # before bodies pile up
            raise GatewayError(503, "Too many ask for files at once: try again.", code="overloaded", retry_after_s=1.0)
        async with at_once:
            client = gateway.relay.access.identify(request.method, dict(request.scope["headers"])).name
            owner, asked_id = hashlib.sha256(client.encode()).hexdigest()[:32], request.path_params.get("id", "")
            content_type, body = request.headers.get("content-type", ""), await request.body()
            asked = Asked(owner, client, asked_id, request.query_params, content_type, body)
            made = await asyncio.to_thread(work, asked)
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
        file_id = f"file-{_new_digits()}"
        self._storage.write(f"{folder}/{file_id}.jsonl", [content])
        record = file_record(file_id, len(content), name, "batch")
        self._storage.write_json(f"{folder}/{file_id}.json", record)
        return record

    def file(self, asked: Asked) -> Document:
        """Return what is told of a file."""
        return self._found(f"{asked.owner}/files/{asked.id}.json", asked.id)

    def content(self, asked: Asked) -> Response:
        """Return the bytes of a file."""
        path = f"{asked.owner}/files/{self.file(asked)['id']}.jsonl"
        return StreamingResponse(self._storage.chunks(path), media_type="application/octet-stream")

    def delete(self, asked: Asked) -> Document:
        """Delete a file that no open batch needs."""
        path = f"{asked.owner}/files/{self.file(asked)['id']}"
        markers = (self._storage.read(f"open/{name}") or {} for name in self._open(asked.owner))
        if any(marker.get("input_file_id") == asked.id for marker in markers):
            raise GatewayError(409, "A batch that has not ended needs this file.", code="file_in_use")
        self._storage.remove(f"{path}.json", f"{path}.jsonl")
        return {"id": asked.id, "object": "file", "deleted": True}

    def files(self, asked: Asked) -> Document:
        """List files."""
        folder, purpose = f"{asked.owner}/files", asked.query.get("purpose")
        names = [name for name in self._storage.names(folder) if name.endswith(".json")]
        ids = sorted((name.removesuffix(".json") for name in names), key=lambda name: name[5:])
        read = (self._storage.read(f"{folder}/{each}.json") for each in _following(ids, asked.query))
        return _page((each for each in read if each and purpose in {None, each["purpose"]}), asked.query)

    def create(self, asked: Asked) -> Document:
        """Begin a batch."""
        try:
            fields = orjson.loads(asked.body)
        except orjson.JSONDecodeError as error:
            raise _invalid("The body is not JSON.") from error
        if not isinstance(fields, dict):
            raise _invalid("The body is not a JSON object.")
        metadata, owner, most = fields.get("metadata"), asked.owner, self._settings.max_batches_per_key
        if fields.get("endpoint") not in _ENDPOINTS:
            raise _invalid(f"The endpoint of a batch is one of {', '.join(_ENDPOINTS)}.", "endpoint")
        if fields.get("completion_window") != "24h":
            raise _invalid("The completion_window of a batch is `24h`.", "completion_window")
        if not isinstance(metadata, dict | None) or len(orjson.dumps(metadata)) > _MOST_METADATA_BYTES:
            raise _invalid(f"The metadata is an object of at most {_MOST_METADATA_BYTES} bytes.", "metadata")
        file_id = str(fields.get("input_file_id"))
        if self.file(asked._replace(id=file_id))["purpose"] != "batch":
            raise _invalid("The input file needs the purpose `batch`.", "input_file_id")
        is_open = self._open(owner)
        if len(is_open) >= most:
            text = f"This key has {most} batches that have not ended: wait, or cancel one."
            raise GatewayError(429, text, code="too_many_batches")
        for batch_id in self._storage.names(f"{owner}/batches")[: -_KEPT * most]:
            if f"{owner}.{batch_id}" not in is_open:
                self._storage.remove(f"{owner}/batches/{batch_id}")
        batch_id, now_s = f"batch_{_new_digits()}", int(time.time())
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        marker = {"id": batch_id, "input_file_id": file_id, "created_at": now_s, "expires_at": now_s + WINDOW_S}
        record = dict.fromkeys([*(f"{status}_at" for status in times), "errors", "output_file_id", "error_file_id"])
        record |= marker | {"object": "batch", "status": "validating", "metadata": metadata, "completion_window": "24h"}
        record |= {"endpoint": fields["endpoint"], "request_counts": {"total": 0, "completed": 0, "failed": 0}}
        self._storage.write_json(f"{owner}/batches/{batch_id}/batch.json", record)
        self._storage.write_json(f"open/{owner}.{batch_id}", marker | {"client": asked.client, "owner": owner})
        return record

    def batch(self, asked: Asked) -> Document:
        """Return what is told of a batch."""
        record = self._found(f"{asked.owner}/batches/{asked.id}/batch.json", asked.id)
        is_open = record["status"] not in ENDED
        marker = self._storage.read(f"open/{asked.owner}.{asked.id}.cancel") if is_open else None
        return record if marker is None else record | marker | {"status": "cancelling"}

    def batches(self, asked: Asked) -> Document:
        """List batches."""
        ids = _following(self._storage.names(f"{asked.owner}/batches"), asked.query)
        return _page((self.batch(asked._replace(id=each)) for each in ids), asked.query)

    def cancel(self, asked: Asked) -> Document:
        """Have a batch end."""
        record = self.batch(asked)
        if record["status"] in ENDED:
            raise GatewayError(409, f"This batch has ended: it is {record['status']}.", code="batch_ended")
        marker = {"cancelling_at": record["cancelling_at"] or int(time.time())}
        self._storage.write_json(f"open/{asked.owner}.{asked.id}.cancel", marker)
        return record | marker | {"status": "cancelling"}

    def _open(self, owner: str) -> list[str]:
        """Return the names of the markers of a key's open batches."""
        names = self._storage.names("open")
        return [name for name in names if name.startswith(owner) and not name.endswith(".cancel")]

    def _found(self, path: str, name: str) -> Document:
        record = self._storage.read(path) if _ID.fullmatch(name) else None
        if record is None:
            raise GatewayError(404, f"There is no {name[:100]!r} here.", code="not_found", param="id")
        return record


def read_form(content_type: str, body: bytes) -> dict[str, tuple[str, bytes | memoryview]]:
    r"""Return the fields of a form, each with the name of its file, and its content in the memory of the form.

    Examples
    --------
    >>> body = b'--x\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n\r\nHi\r\n--x--\r\n'
    >>> name, content = read_form("multipart/form-data; boundary=x", body)["a"]
    >>> name, bytes(content)
    ('f', b'Hi')
    """
    boundary = _BOUNDARY.match(content_type)
    delimiter = b"\r\n--%b" % ("" if boundary is None else boundary[1]).encode("latin-1", "replace")
    form: dict[str, tuple[str, bytes | memoryview]] = {}
    at = len(delimiter) - 2 if boundary is not None and body.startswith(delimiter[2:]) else len(body)
    while body[at : at + 2] == b"\r\n" and len(form) < _MOST_FIELDS:
        begin = body.find(b"\r\n\r\n", at) + 4
        end = body.find(delimiter, begin - 2)
        if begin < 4 or end < 0 or (found := _FIELD.search(body, at, begin)) is None:
            break
        content = memoryview(body)[begin : max(begin, end)]
        form[found[1].decode()] = (found[2] or b"").decode("utf-8", "replace"), content
        at = end + len(delimiter)
    if body[at : at + 2] != b"--":
        text = f"The body is no form with up to {_MOST_FIELDS} fields: send it as multipart/form-data."
        raise GatewayError(400, text, code="invalid_form")
    return form


def _new_digits() -> str:
    """Return 32 hex digits that nobody can guess, in the order of time."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


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
