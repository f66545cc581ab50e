"""Measure the cost of `gateway bench` itself, against a server that only sends chunks on time.

    python -m benchmarks.load_generator [STREAMS...]

Every stream has 128 chunks, 20 ms apart. Prints a Markdown table: chunks per second, the generator's share of a core,
its longest stalls, and the inter-token latency that it measures (20 ms if it keeps up).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

CHUNKS, STEP_S = 128, 0.020
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_WHOLE = b'{"choices":[{"index":0,"message":{"content":"x"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(document: str) -> bytes:
    event = f"data: {document}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


_DELTA = _chunk(
    json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " word"}}]})
)
_USAGE = {"prompt_tokens": 9, "completion_tokens": CHUNKS, "total_tokens": 9 + CHUNKS}
_END = _chunk(json.dumps({"choices": [], "usage": _USAGE})) + _chunk("[DONE]") + b"0\r\n\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
            )
            body = await reader.readexactly(length)
            if b'"stream":true' in body:
                writer.write(_HEAD)
                start_s = loop.time()
                for step in range(1, CHUNKS + 1):
                    await asyncio.sleep(start_s + step * STEP_S - loop.time())
                    writer.write(_DELTA)
                writer.write(_END)
            else:
                body = _MODELS if head.startswith(b"GET /v1/models") else _WHOLE
                status = b"404 Not Found" if head.startswith(b"GET /metrics") else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
    writer.close()


def _serve(ready: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=2048)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


def main() -> None:
    """Measure with each number of streams, and print the table."""
    receiver, sender = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(sender,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{receiver.recv()}"
    print("| streams at once | chunks/s | share of a core | stalls, p99 (ms) | ITL p50, p95, p99 (ms) |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for streams in [int(word) for word in sys.argv[1:]] or [50, 200, 400]:
            file = Path(folder) / "report.json"
            options = ["--url", url, "--concurrency", str(streams), "--num-requests", str(4 * streams)]
            options += ["--input-tokens", "64", "--output-tokens", str(CHUNKS), "--json", str(file)]
            command = [sys.executable, "-m", "gateway", "bench", *options]
            subprocess.run(command, check=True, capture_output=True)
            run = json.loads(file.read_text())["runs"][0]
            assert run["tokens_per_chunk"] == 1.0
            generator, itl = run["generator"], run["itl"]
            print(
                f"| {streams} | {run['output_tokens_per_s']:,.0f} | {generator['cpu_share']:.0%} "
                f"| {generator['stall_p99_ms']:.1f} | {itl['p50']:.1f}, {itl['p95']:.1f}, {itl['p99']:.1f} |"
            )
    server.terminate()
    server.join()


if __name__ == "__main__":
    main()
