"""Commands that send a load, in processes of their own, and the endpoint that they send it to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial

from tests.support.command import ROOT
from tests.support.upstream import END, Behaviour, Wire, answer, delta


async def start(*arguments: object) -> asyncio.subprocess.Process:
    """Start `gateway` with these arguments."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *map(str, arguments)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"},
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Wait for a command; return its status, stdout and stderr."""
    try:
        out, err = await asyncio.wait_for(process.communicate(), 90.0)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def streamed(wire: Wire, tokens: int = 4, per_chunk: int = 1) -> None:
    """Answer with usage; the prompt has 10 tokens more than words."""
    asked = wire.seen.json
    words = len(str(asked.get("prompt") or asked["messages"][-1]["content"]).split())
    usage = {"prompt_tokens": words + 10, "completion_tokens": tokens, "total_tokens": words + 10 + tokens}
    if not asked["stream"]:
        await wire.json(answer("x") | {"usage": usage})
        return
    await wire.begin_stream()
    for _ in range(tokens // per_chunk):
        await wire.chunk(delta("x"))
    await wire.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
    await wire.chunk(END)
    await wire.end_stream()


def streaming(tokens: int, per_chunk: int = 1) -> Behaviour:
    """Return a behaviour that streams so many tokens in chunks."""
    return partial(streamed, tokens=tokens, per_chunk=per_chunk)
