"""Batches in front of scripted engines, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai

from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.upstream import Wire, hang, well
from tests.support.waiting import eventually_async

CHAT: Final = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": body | fields}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def kept(folder: Path) -> list[Path]:
    """Return the files of a folder and those below, without its lock."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


@asynccontextmanager
async def batches(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    settings = {"timeouts": {"first_byte_s": 60.0}} | settings  # what is held is not asked for again
    async with start_gateway(batches={"folder": str(folder)} | settings.pop("batches", {}), **settings) as running:
        yield running


def client_of(running: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


async def begin(client: openai.AsyncOpenAI, content: bytes, url: Any = CHAT) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )


async def holds(wire: Wire) -> None:
    """Answer what is to be answered, and hold the rest."""
    await (hang(wire) if b"held" in wire.seen.body else well(wire))


async def ended(client: openai.AsyncOpenAI, batch_id: str, status: str = "completed") -> Any:
    async def is_it() -> bool:
        return (await client.batches.retrieve(batch_id)).status in {"failed", "completed", "expired", "cancelled"}

    await eventually_async(is_it)
    batch = await client.batches.retrieve(batch_id)
    assert batch.status == status, batch
    return batch


async def until_completed(client: openai.AsyncOpenAI, batch_id: str, count: int) -> None:
    """Wait until so many lines of a batch have been answered."""

    async def is_it() -> bool:
        counts = (await client.batches.retrieve(batch_id)).request_counts
        return counts is not None and counts.completed == count

    await eventually_async(is_it)


async def lines_of(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]
