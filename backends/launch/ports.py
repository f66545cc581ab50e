"""Ports for the engines that the gateway starts."""

from __future__ import annotations

import errno
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port on which nothing listens.

    It lies below the range from which the kernel gives ports to outgoing connections, since an engine may take a
    minute to bind it and meanwhile such a connection could have it.

    Raises
    ------
    OSError
        None was found.
    """
    for port in random.sample(range(20000, 32000), 500):
        if port_is_free(host, port):
            return port
    raise OSError(f"no free port between 20000 and 32000 on {host}")


def port_is_free(host: str, port: int) -> bool:
    """Tell whether nothing is bound to the port; True for an address that is not of this machine.

    vLLM binds with SO_REUSEPORT: on a port in use it starts without a word and gets a part of the other's traffic.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections in TIME_WAIT do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
