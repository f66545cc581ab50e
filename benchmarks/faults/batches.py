"""Batches under faults: one after another, each line of which must have one answer, word by word."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import httpx

from benchmarks.faults.answers import DocumentAnswer
from benchmarks.faults.asking import LINES, Work
from benchmarks.faults.load import numbers

_LINES_EACH, _TOKENS = 60, (5, 20, 80)
_POLL_S, _AGAIN_S = 0.5, 1.0
_ENDPOINT = "/v1/completions"


@dataclass(slots=True)
class Batches:
    """What became of them.

    Parameters
    ----------
    lines, answered
        Lines of batches that have ended, and those with the right answer.
    wrong
        Lines without exactly one answer, or with another one, in words.
    ids
        Ids of their requests, as the replicas write them.
    """

    ended: int = 0
    lines: int = 0
    answered: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)

    async def run(self, port: int, end: asyncio.Event) -> None:
        """Run batches until `end` is set; the last one is waited for."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30.0) as client:
            while not end.is_set():
                await self._one(client)

    async def _one(self, client: httpx.AsyncClient) -> None:
        works = {
            f"line-{at}": Work(next(numbers), _TOKENS[at % len(_TOKENS)], is_chat=False) for at in range(_LINES_EACH)
        }
        self.ids += [work.request_id for work in works.values()]
        body = "\n".join(json.dumps(_line(custom_id, work)) for custom_id, work in works.items())
        form = {"files": {"file": ("lines.jsonl", body.encode())}, "data": {"purpose": "batch"}}
        file_id = (await _asked(client, "POST", "/v1/files", **form))["id"]
        fields = {"input_file_id": file_id, "endpoint": _ENDPOINT, "completion_window": "24h"}
        batch = await _asked(client, "POST", "/v1/batches", json=fields)
        while batch["status"] not in {"completed", "failed", "expired", "cancelled"}:
            await asyncio.sleep(_POLL_S)
            batch = await _asked(client, "GET", f"/v1/batches/{batch['id']}")
        found: dict[str, list[str]] = {custom_id: [] for custom_id in works}
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                for line in (await _answered(client, "GET", f"/v1/files/{batch[name]}/content")).text.splitlines():
                    custom_id, verdict = _verdict(json.loads(line), works)
                    found[custom_id].append(verdict)
                await _asked(client, "DELETE", f"/v1/files/{batch[name]}")
        await _asked(client, "DELETE", f"/v1/files/{file_id}")
        self.ended += 1
        self.lines += len(works)
        for verdicts in found.values():
            if verdicts == ["answered"]:
                self.answered += 1
            else:
                what = " and ".join(verdicts) or "no answer"
                self.wrong[what] = self.wrong.get(what, 0) + 1


def _line(custom_id: str, work: Work) -> dict[str, object]:
    body = {"model": LINES, "prompt": work.prompt(200), "max_tokens": work.tokens, "temperature": 0.0}
    return {"custom_id": custom_id, "method": "POST", "url": _ENDPOINT, "body": body}


def _verdict(line: dict[str, dict[str, object]], works: dict[str, Work]) -> tuple[str, str]:
    custom_id = str(line["custom_id"])
    if line["response"] is None:
        return custom_id, str(line["error"])
    answer = DocumentAnswer(works[custom_id])
    answer.status = int(str(line["response"]["status_code"]))
    answer.feed(json.dumps(line["response"]["body"]).encode())
    return custom_id, answer.verdict()[0]


async def _answered(client: httpx.AsyncClient, method: str, path: str, **fields: object) -> httpx.Response:
    """Return the answer to a request, which is sent again while there is none or the gateway is not ready."""
    while True:
        try:
            answer = await client.request(method, path, **fields)  # type: ignore[arg-type]
        except httpx.HTTPError:
            await asyncio.sleep(_AGAIN_S)
            continue
        if answer.status_code < 429:
            return answer.raise_for_status()
        await asyncio.sleep(_AGAIN_S)


async def _asked(client: httpx.AsyncClient, method: str, path: str, **fields: object) -> dict[str, str]:
    document: dict[str, str] = (await _answered(client, method, path, **fields)).json()
    return document
