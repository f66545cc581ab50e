"""Batches under faults: one after another, each line of which must have one answer, word by word."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx

from benchmarks.faults.answers import DocumentAnswer
from benchmarks.faults.asking import LINES, Work
from benchmarks.faults.load import ANSWERED, SILENT, numbers

_LINES_EACH, _TOKENS, _POLL_S = 60, 40, 0.5
_PATH = "/v1/completions"


@dataclass(slots=True)
class Batches:
    """What became of batches.

    Parameters
    ----------
    failed, wrong
        Lines whose one answer is an error; those without exactly one answer, or with one that is not theirs.
    ids
        Of the requests of all lines.
    """

    failed: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    ids: list[str] = field(default_factory=list)

    async def run(self, port: int, is_enough: Callable[[], bool]) -> None:
        """Run batches until there are enough; the last one is waited for."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30.0) as client:
            while not is_enough():
                await self._one(client)

    async def _one(self, client: httpx.AsyncClient) -> None:
        works = {f"q{number}": Work(number, _TOKENS, is_chat=False) for number in islice(numbers, _LINES_EACH)}
        lines = "\n".join(json.dumps(_line(work)) for work in works.values())
        form = {"files": {"file": ("lines.jsonl", lines.encode())}, "data": {"purpose": "batch"}}
        input_id = (await _asked(client, "POST", "/v1/files", **form)).json()["id"]
        asked = {"input_file_id": input_id, "endpoint": _PATH, "completion_window": "24h"}
        batch = (await _asked(client, "POST", "/v1/batches", json=asked)).json()
        while batch["status"] in {"validating", "in_progress", "finalizing"}:
            await asyncio.sleep(_POLL_S)
            batch = (await _asked(client, "GET", f"/v1/batches/{batch['id']}")).json()
        found = defaultdict[str, list[str]](list)
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            for line in (await _asked(client, "GET", f"/v1/files/{file_id}/content")).iter_lines():
                answer = json.loads(line)
                found[answer["custom_id"]].append(_verdict(answer, works[answer["custom_id"]]))
        self.ids += works
        for verdicts in [found[each] for each in works if found[each] != [ANSWERED]]:
            is_told = len(verdicts) == 1 and verdicts[0] not in SILENT
            (self.failed if is_told else self.wrong)[" and ".join(verdicts) or "no answer"] += 1


def _line(work: Work) -> dict[str, Any]:
    body = {"model": LINES, "prompt": work.prompt(200), "max_tokens": work.tokens, "temperature": 0.0}
    return {"custom_id": work.request_id, "method": "POST", "url": _PATH, "body": body}


def _verdict(line: dict[str, Any], work: Work) -> str:
    if line["response"] is None:
        return str(line["error"]["code"])
    answer = DocumentAnswer(work)
    answer.status = line["response"]["status_code"]
    answer.feed(json.dumps(line["response"]["body"]).encode())
    return answer.verdict()[0]


async def _asked(client: httpx.AsyncClient, method: str, path: str, **fields: Any) -> httpx.Response:
    """Return the answer to a request, which is sent again while there is none, or no room on the disk."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await client.request(method, path, **fields)
            if answer.status_code < 429:
                return answer.raise_for_status()
        await asyncio.sleep(_POLL_S)
