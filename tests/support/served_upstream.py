"""The scripted server behind the command line of `vllm serve`; a script for `serve.command` of a pool file.

It ends at once with a speculative config that holds the word `refused`, and with SIGTERM, in the middle of its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

from tests.support.upstream import END, Upstream, Wire, answer, delta

TOKENS = 24
_TOKEN_S = 0.004


async def text(wire: Wire) -> None:
    """Answer with some tokens, one after the other."""
    document = answer(wire.upstream.name, TOKENS)
    if not wire.seen.json.get("stream"):
        await asyncio.sleep(TOKENS * _TOKEN_S)
        await wire.json(document)
        return
    await wire.begin_stream()
    for number in range(TOKENS):
        await asyncio.sleep(_TOKEN_S)
        await wire.chunk(delta(f"{number} "))
    usage = {key: document[key] for key in ("id", "model", "usage")} | {"choices": []}
    await wire.chunk(b"data: " + json.dumps(usage).encode() + b"\n\n")
    await wire.chunk(END)
    await wire.end_stream()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", default="")
    options, _ = parser.parse_known_args()
    if "refused" in options.speculative_config:
        sys.exit("this speculative config is refused")
    upstream = Upstream(options.model, options.served_model_name, text)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await upstream.listen(options.port)
    await ended.wait()
    await upstream.die()


if __name__ == "__main__":
    asyncio.run(main())
