"""`python -m backends.simulator [FILE]`: host the replicas that a JSON document describes, in one process.

The document is read from FILE, or from stdin without one.

When all of them listen, one line of JSON on stdout says where: `{"ready": [{"name": ..., "url": ...}]}`. A wrong
document: exit 2, what is wrong on stderr. A port that is taken: exit 1. SIGTERM or SIGINT: exit 0.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
from pydantic import ValidationError

from backends.drafting import suffix_jit
from backends.simulator.server.replica import Replica
from backends.simulator.server.settings import SimulatorSettings
from backends.simulator.text import model as text
from backends.speculation import Method

_GARBAGE_THRESHOLD = 20_000  # objects; hardly any are garbage that counting references does not find
_SWITCH_INTERVAL_S = 0.0005  # the loop's thread must not wait long for those that read prompts


async def serve(settings: SimulatorSettings) -> None:
    """Host the replicas until SIGTERM or SIGINT.

    Raises
    ------
    OSError
        If a replica cannot listen where it is told to; nothing is left running then.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    models = {name: text.load(name) for name in {replica.model for replica in settings.replicas}}
    shared = ThreadPoolExecutor(1, "requests")
    executors = [
        # Until its rules are compiled, suffix decoding takes tens of milliseconds a request: those of other replicas
        # are not to queue behind it.
        ThreadPoolExecutor(1, each.name) if each.method is Method.SUFFIX else shared
        for each in settings.replicas
    ]
    suffix = any(each.method is Method.SUFFIX for each in settings.replicas)
    compiling = loop.create_task(_compile_suffix()) if suffix else None
    replicas = [
        Replica(each, models[each.model], executor) for each, executor in zip(settings.replicas, executors, strict=True)
    ]
    try:
        for replica in replicas:
            await replica.start()
        ready = [{"name": each.settings.name, "url": f"http://{each.settings.host}:{each.port}"} for each in replicas]
        sys.stdout.write(json.dumps({"ready": ready}) + "\n")
        sys.stdout.flush()
        # What is there now stays: not to be gone through each time garbage is looked for, which holds up the streams.
        gc.freeze()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        await stopping.wait()
    finally:
        if compiling is not None:
            compiling.cancel()
            await asyncio.wait([compiling])
        for replica in replicas:
            await replica.stop()
        for executor in executors:
            executor.shutdown(cancel_futures=True)


async def _compile_suffix() -> None:
    """Change to the compiled rules of suffix decoding as soon as they are there.

    Compiling them, once for an installation, is left to another process: here it would hold up the streams.
    """
    if not suffix_jit.can_compile():
        sys.stderr.write("simulator: without numba suffix drafting is slow: pip install 'speculation-gateway[lab]'\n")
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", suffix_jit.__name__), stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr
    )
    try:
        failed = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if failed:
        sys.stderr.write("simulator: suffix decoding could not be compiled and stays slow\n")
    else:
        threading.Thread(target=suffix_jit.load, name="compiled", daemon=True).start()


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
