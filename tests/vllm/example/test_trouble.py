"""What speculation may break, asked of real engines: structured output, thinking, several answers."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest

from gateway.rooms.trouble.answer import problem_of
from policies.features.request import Endpoint
from tests.vllm.conftest import Served
from tests.vllm.example.conftest import BACKENDS
from tests.vllm.requests import to

pytestmark = pytest.mark.vllm

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["heap", "sort"]}}, "required": ["name"]}
ASKED: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}},
    "regex": {"structured_outputs": {"regex": "(heap|sort)[0-9]{3}"}},
    "choice": {"structured_outputs": {"choice": ["yes, it does", "no, it does not"]}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "several": {"n": 3},
}
EACH = 2


def test_healthy_engines_are_suspected_of_nothing(served: Served) -> None:
    """What they answer is printed. So small a model repeats itself to the limit, with drafts and without."""

    def ask(case: tuple[str, str, int]) -> tuple[str, str, str]:
        backend, kind, number = case
        body = {
            "model": "tiny",
            "temperature": (0.2, 0.8)[number],
            "max_tokens": 40,
            "stream": number == 0,
            **ASKED[kind],
        }
        body["messages"] = [{"role": "user", "content": f"Write function number {number} of Python's heapq."}]
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=to(backend), timeout=120)
        if answer.status_code != 200:
            return backend, kind, str(answer.status_code)
        shape = ("json_schema",) if kind == "json_schema" else ()
        problem = problem_of(Endpoint.CHAT, shape, answer.content, stream=bool(body["stream"]))
        if not problem and kind == "json_schema" and not body["stream"]:
            (choice,) = answer.json()["choices"]
            if choice["finish_reason"] == "stop":  # a grammar allows white space without end
                assert json.loads(choice["message"]["content"])["name"] in {"heap", "sort"}
        return backend, kind, problem or "well"

    with ThreadPoolExecutor(4) as threads:
        seen = Counter(threads.map(ask, product(BACKENDS, ASKED, range(EACH))))
    print(seen)
    assert {outcome for _, _, outcome in seen} <= {"well", "endless repetition"}
    assert sum(seen.values()) == len(BACKENDS) * len(ASKED) * EACH
    assert "such requests go elsewhere" not in served.command.printed()
