"""TCP ports for engines that the gateway starts."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Container


def free_port(host: str = "127.0.0.1", others: Container[int] = ()) -> int:
    """Return a TCP port from 20000 to 32000 on which nothing listens and that is not in `others`.

    The range lies below the kernel's ephemeral ports: an engine may take a minute to bind its port, and no outgoing
    connection must take it meanwhile.
    """
    for port in random.sample(range(20000, 32000), 500):
        if port not in others and port_is_free(host, port):
            return port
    raise OSError(f"no free port between 20000 and 32000 on {host}")


def port_is_free(host: str, port: int) -> bool:
    """Return whether nothing is bound to the port; True for an address of another machine.

    vLLM binds with SO_REUSEPORT: on a port in use it starts without an error and takes part of the other's traffic.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections in TIME_WAIT
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
