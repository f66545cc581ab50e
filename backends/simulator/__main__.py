"""`python -m backends.simulator [FILE]`: host the replicas that a JSON document describes, in one process.

Reads the document from FILE, or from stdin without one.

Once all replicas listen, prints their addresses as one line of JSON: `{"ready": [{"name": ..., "url": ...}]}`.
Exit status: 2 if the document is invalid (the errors are on stderr), 1 if a port is taken, 0 after SIGTERM or SIGINT.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
import uvloop
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from backends.simulator.server.replica import ReplicaServer
from backends.simulator.server.settings import SimulatorSettings
from backends.simulator.text import model as text

_GARBAGE_THRESHOLD = 20_000  # objects; reference counting frees most garbage, so collections can be rare
_SWITCH_INTERVAL_S = 0.0005  # the event loop must quickly get the GIL back from the thread that composes answers


async def serve(settings: SimulatorSettings) -> None:
    """Host the replicas until SIGTERM or SIGINT."""
    models = {name: text.load(name) for name in {replica.model for replica in settings.replicas}}
    executor = ThreadPoolExecutor(1, "requests")
    hosted = [ReplicaServer(each, models[each.model], executor) for each in settings.replicas]
    sockets = [socket.create_server((each.host, each.port), backlog=2048) for each in settings.replicas]
    ports = [int(each.getsockname()[1]) for each in sockets]
    replicas = dict(zip(ports, hosted, strict=True))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await replicas[scope["server"][1]](scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=[("server", "simulated-vllm"), ("x-simulated", "true")],
            timeout_graceful_shutdown=1,
        )
    )
    ready = [
        {"name": each.name, "url": f"http://{each.host}:{port}"}
        for port, each in zip(ports, settings.replicas, strict=True)
    ]
    sys.stdout.write(json.dumps({"ready": ready}) + "\n")
    sys.stdout.flush()
    # Exclude long-lived objects from garbage collection, as its pauses would delay the streams.
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn handles them, and raises them again when it ends
        signal.signal(number, signal.SIG_IGN)
    await server.serve(sockets)
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
