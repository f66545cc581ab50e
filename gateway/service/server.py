"""The HTTP server of a gateway process: uvicorn, with signals and draining as the gateway wants them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import resource
import socket
from collections.abc import Iterator

import uvicorn

from gateway.frontend.uvicorn import is_supported, protocol_for
from gateway.service.app import Application, max_body_bytes
from gateway.service.assembly import Gateway
from gateway.service.worker_messages import WorkerMessages

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_YOUNG_OBJECTS = 20_000  # more than a thousand requests under way hold
_KEEP_ALIVE_S = 75  # longer than the idle time of clients' pools, so that they, not we, close


class Server(uvicorn.Server):
    """Serves one gateway process on sockets that are open already.

    uvicorn by itself dies of the signal that ended it; this one only stops when told to, so that the process can end
    with status 0 after it has stopped what it started.

    Parameters
    ----------
    fast
        Whether the relay's requests are taken before ASGI (`gateway.frontend.uvicorn`), where uvicorn allows that.
    has_process
        Whether nothing else goes on in this process: then what lives when it has started is kept from the garbage
        collector, which would go through all of it again and again.
    """

    def __init__(
        self, gateway: Gateway, worker_messages: WorkerMessages, *, fast: bool = True, has_process: bool = False
    ) -> None:
        self._gateway = gateway
        self._has_process = has_process
        if fast and not is_supported():
            logger.warning("uvicorn %s is not built as expected: served by ASGI alone, slower", uvicorn.__version__)
            fast = False
        self._drain_s = gateway.settings.server.drain_s
        super().__init__(
            uvicorn.Config(
                Application(gateway, worker_messages),
                http=protocol_for(gateway.relay, max_body_bytes(gateway)) if fast else "httptools",
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(self._drain_s) + 5,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        if self._has_process:
            spare_the_collector()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process around."""
        yield

    def drain(self) -> None:
        """Take nothing new, let what is under way end, and break it off when its time is over; a second call, now."""
        if self.should_exit:
            self._gateway.relay.stop()
            self.force_exit = True
            return
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_s, self._gateway.relay.stop)


def allow_many_files() -> None:
    """Raise this process's limit on open files as far as it may: each stream needs two, and 1,024 is a usual limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def spare_the_collector() -> None:
    """Keep the garbage collector off what is there already, and let it look at new objects less often.

    What was imported and assembled stays for the life of the process; looking through all of it takes tens of
    milliseconds, in which no request moves. Requests and connections go by reference counts, so that little is left to
    be found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def listen(host: str, port: int, *, shared: bool, checked: bool = False) -> socket.socket:
    """Open the socket to serve on.

    Parameters
    ----------
    shared
        True if several worker processes listen on the same port (SO_REUSEPORT).
    checked
        True if the port is known to be ours, as it is to a worker.

    Raises
    ------
    OSError
        If the address is not this machine's or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, family=0, type=socket.SOCK_STREAM)[0]
    if shared and port and not checked:
        with socket.socket(family, kind, protocol) as probe:  # a port shared with a stranger would be split silently
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened
