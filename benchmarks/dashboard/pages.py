"""Open dashboards: clients that read the stream of the gateway, each on a connection of its own.

Run as `python -m benchmarks.dashboard.pages PORT COUNT SECONDS KEY`; prints one line of JSON once all are open, and one
with what they have read at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

_SNAPSHOT = b"event: snapshot\n"


class _Page:
    """One client, with the snapshots and bytes that it has read."""

    def __init__(self) -> None:
        self.snapshots = self.bytes = 0
        self.opened = asyncio.Event()

    async def read(self, port: int, key: str) -> None:
        """Read the stream until cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET /admin/dashboard/events HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n\r\n"
        writer.write(head.encode())
        end = b""
        try:
            while data := await reader.read(2**16):
                joined = end + data
                self.snapshots += joined.count(_SNAPSHOT)
                self.bytes += len(data)
                end = joined[-len(_SNAPSHOT) + 1 :]
                self.opened.set()
        finally:
            writer.close()


async def run(port: int, count: int, seconds: float, key: str) -> None:
    """Keep the pages open."""
    pages = [_Page() for _ in range(count)]
    tasks = [asyncio.create_task(page.read(port, key)) for page in pages]
    for page in pages:
        await page.opened.wait()
    print(json.dumps({"open": count}), flush=True)
    await asyncio.sleep(seconds)
    if any(task.done() for task in tasks):
        raise SystemExit("the gateway has ended a stream")
    snapshots = [page.snapshots for page in pages]
    size = sum(page.bytes for page in pages)
    print(json.dumps({"snapshots": sum(snapshots), "fewest": min(snapshots), "bytes": size}), flush=True)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
