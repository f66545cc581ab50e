"""The gRPC health service."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from gateway.picker.grpc.call import INVALID_ARGUMENT, NOT_FOUND, Call


class Health:
    """Which services can serve, for `grpc.health.v1.Health`."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._watchers: set[_Question] = set()

    def set(self, service: str, *, serves: bool) -> None:
        """Set whether a service can serve, and tell those who watch it."""
        if self._serving.get(service) is not serves:
            self._serving[service] = serves
            for watcher in list(self._watchers):
                if watcher.service == service:
                    watcher.tell()

    def check(self, call: Call) -> _Question:
        """Answer once, or that the service is unknown."""
        return _Question(self, call, is_watch=False)

    def watch(self, call: Call) -> _Question:
        """Answer now and after each change."""
        return _Question(self, call, is_watch=True)

    def status(self, service: str) -> int | None:
        """Return the status of a service; None if it is unknown."""
        serves = self._serving.get(service)
        if serves is None:
            return None
        return HealthCheckResponse.SERVING if serves else HealthCheckResponse.NOT_SERVING

    def keep(self, watcher: _Question) -> None:
        """Send a watcher each change from now on."""
        self._watchers.add(watcher)

    def forget(self, watcher: _Question) -> None:
        """Stop sending changes."""
        self._watchers.discard(watcher)


class _Question:
    """A call of `Check` or `Watch`."""

    def __init__(self, health: Health, call: Call, *, is_watch: bool) -> None:
        self._health = health
        self._call = call
        self._is_watch = is_watch
        self.service: str | None = None

    def handle(self, message: bytes | bytearray) -> None:
        """Handle the question."""
        if self.service is not None:
            self._call.fail(INVALID_ARGUMENT, "Expected one message.")
            return
        try:
            self.service = HealthCheckRequest.FromString(bytes(message)).service
        except DecodeError:
            self._call.fail(INVALID_ARGUMENT, "Expected a HealthCheckRequest.")
            return
        if self._is_watch:
            self._health.keep(self)
            self.tell()
        elif self._health.status(self.service) is None:
            self._call.fail(NOT_FOUND, "There is no such service.")
        else:
            self.tell()
            self._call.end()

    def tell(self) -> None:
        """Send the status."""
        status = self._health.status(self.service or "")
        known = HealthCheckResponse.SERVICE_UNKNOWN if status is None else status
        self._call.send(HealthCheckResponse(status=known).SerializeToString())

    def half_close(self) -> None:
        """Go on: the answer is on its way."""
        if self.service is None:
            self._call.fail(INVALID_ARGUMENT, "Expected a HealthCheckRequest.")

    def close(self) -> None:
        """Stop sending changes."""
        self._health.forget(self)
