"""The batch API by OpenAI's own client, in front of scripted engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.waiting import eventually_async

CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": body | fields}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@asynccontextmanager
async def batches(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    async with start_gateway(batches={"url": str(folder)} | settings.pop("batches", {}), **settings) as running:
        yield running


def client_of(running: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


async def begin(client: openai.AsyncOpenAI, content: bytes, url: Any = CHAT) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str, status: str = "completed") -> Any:
    async def is_it() -> bool:
        return (await client.batches.retrieve(batch_id)).status in {"failed", "completed", "expired", "cancelled"}

    await eventually_async(is_it)
    batch = await client.batches.retrieve(batch_id)
    assert batch.status == status, batch
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_from_its_upload_to_its_output(tmp_path: Path) -> None:
    names = [f"line {number}" for number in range(30)]
    async with batches(tmp_path) as running, client_of(running) as client:
        batch = await begin(client, jsonl(*map(line, names)))
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"a": "b"})
        batch = await ended(client, batch.id)
        assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
        assert batch.error_file_id is None
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == batch.created_at + 86400
        output = await lines_of(client, batch.output_file_id)
        assert sorted(each["custom_id"] for each in output) == sorted(names)
        assert {each["response"]["status_code"] for each in output} == {200}
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in output} <= {"from a", "from b"}
        assert len({each["id"] for each in output}) == len({each["response"]["request_id"] for each in output}) == 30
        assert sum(len(upstream.seen) for upstream in running.upstreams.values()) == 30

        files = await client.files.list()
        assert {file.id for file in files.data} == {batch.input_file_id, batch.output_file_id}
        assert [each.id async for each in await client.batches.list()] == [batch.id]
        file = await client.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.bytes) == ("batch_output", len((await client.files.content(file.id)).content))
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        page = (await running.client.get("/metrics")).text
        assert f'gateway_batch_lines_total{{model="{MODEL}",outcome="completed"}} 30.0' in page
