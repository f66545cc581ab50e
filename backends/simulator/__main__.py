"""`python -m backends.simulator [FILE]`: host the replicas described by a JSON document, in one process.

The document is read from FILE, or from stdin if there is no FILE.

Once all replicas listen, one line of JSON on stdout gives their addresses: `{"ready": [{"name": ..., "url": ...}]}`.
Exit status: 2 if the document is invalid (the errors are on stderr), 1 if a port is taken, 0 after SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
from pydantic import ValidationError

from backends.simulator.server.replica import Replica
from backends.simulator.server.settings import SimulatorSettings
from backends.simulator.text import model as text

_GARBAGE_THRESHOLD = 20_000  # objects; reference counting frees nearly all garbage, so collections can be rare
_SWITCH_INTERVAL_S = 0.0005  # the event loop must get the GIL back quickly from the threads that compose answers


async def serve(settings: SimulatorSettings) -> None:
    """Host the replicas until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    models = {name: text.load(name) for name in {replica.model for replica in settings.replicas}}
    executor = ThreadPoolExecutor(1, "requests")
    replicas = [Replica(each, models[each.model], executor) for each in settings.replicas]
    try:
        for replica in replicas:
            await replica.start()
        ready = [{"name": each.settings.name, "url": f"http://{each.settings.host}:{each.port}"} for each in replicas]
        sys.stdout.write(json.dumps({"ready": ready}) + "\n")
        sys.stdout.flush()
        # Exclude the long-lived objects from garbage collection, whose pauses would delay the streams.
        gc.freeze()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        await stopping.wait()
    finally:
        for replica in replicas:
            await replica.stop()
        executor.shutdown(cancel_futures=True)


def main() -> int:
    """Read the settings, serve, and return the exit status."""
    document = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else sys.stdin.buffer.read()
    try:
        settings = SimulatorSettings.model_validate_json(document)
    except ValidationError as error:
        for wrong in error.errors(include_url=False):
            where = ".".join(str(part) for part in wrong["loc"]) or "document"
            sys.stderr.write(f"simulator: {where}: {wrong['msg']}\n")
        return 2
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(serve(settings))
    except OSError as error:
        sys.stderr.write(f"simulator: cannot listen: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
