"""The protocol of systemd, or another service manager: passed sockets, notifications, watchdog."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
from collections.abc import Iterator

from backends.background import Seldom
from backends.validation import UsageError

log = logging.getLogger(__name__)

_FIRST_FD = 3
_SAY_S = 0.5  # it reads promptly, but all services share one queue


class ServiceManager:
    """The service manager that started this process. Its variables are removed from the environment of children.

    Attributes
    ----------
    sockets
        The listening sockets that it passed, by their address: `clients` or `admin`.

    References
    ----------
    sd_listen_fds(3), sd_notify(3), sd_watchdog_enabled(3)
    """

    def __init__(self) -> None:
        count, listen_pid, names = (os.environ.pop(f"LISTEN_{name}", "") for name in ("FDS", "PID", "FDNAMES"))
        watchdog_us, watchdog_pid = (os.environ.pop(f"WATCHDOG_{name}", "") for name in ("USEC", "PID"))
        self._notified = os.environ.pop("NOTIFY_SOCKET", "").replace("@", "\0", 1)  # in the abstract namespace
        pid = str(os.getpid())
        self._watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() and watchdog_pid in {"", pid} else 0.0
        self._warned = Seldom()
        self.sockets: dict[str, socket.socket] = {}
        if listen_pid == pid and count.isdigit():
            self.sockets.update(_received(int(count), names.split(":") if names else []))

    def say(self, state: str) -> None:
        """Send a state, such as `READY=1`, if notifications are expected."""
        if not self._notified:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
                opened.settimeout(_SAY_S)
                opened.sendto(state.encode(), self._notified)
        except OSError as error:
            if self._warned.may_say():
                log.warning("%s cannot be told %s: %s", self._notified, state, error)

    async def keep_alive(self) -> None:
        """Notify the watchdog from the event loop; if the loop hangs, the manager aborts the process."""
        if self._watchdog_s:
            faulthandler.enable()  # prints where the process hung
        while self._watchdog_s:
            self.say("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)


def _received(count: int, names: list[str]) -> Iterator[tuple[str, socket.socket]]:
    """Yield the passed sockets by address; one with a default name, such as the unit's, is for clients."""
    known = set[str]()
    for number in range(count):
        name = names[number] if number < len(names) else ""
        address = "admin" if name == "admin" else "clients"
        try:
            opened = socket.socket(fileno=_FIRST_FD + number)
            is_tcp = opened.family in {socket.AF_INET, socket.AF_INET6}
            is_listening = is_tcp and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            is_listening = False
        if not is_listening or address in known:
            problem = "is not the only one" if is_listening else "does not listen for TCP"
            raise UsageError(
                f"LISTEN_FDS: the socket {name or number} {problem}; expected one ListenStream= with a port and, if "
                "admin.listen is set, another with FileDescriptorName=admin"
            )
        known.add(address)
        opened.set_inheritable(False)
        yield address, opened
