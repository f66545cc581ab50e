"""The section `queue` of a model."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from gateway.config.settings.base import Count, Seconds, Settings


class QueueSettings(Settings):
    """A model's queue in the gateway, for requests beyond what its backends should serve at once.

    Numbers are for all worker processes together; each gets an equal part.

    Parameters
    ----------
    max_in_flight_per_backend
        Most requests in flight at a backend; further ones wait in the gateway.
    max_waiting
        Most requests that wait; further ones are answered with 503.
    max_waiting_mib
        Most MiB of their bodies.
    max_wait_s
        Longest wait in seconds, also for a backend to come up when none is; then 503.
    pass_priority
        Whether engines get the `priority` of a request, as the queue counts it. Only for engines that run with
        `--scheduling-policy priority`: others reject any but 0, so they get 0.
    """

    max_in_flight_per_backend: Count
    max_waiting: Count = 1000
    max_waiting_mib: Annotated[float, Field(gt=0)] = 256.0
    max_wait_s: Seconds = 30.0
    pass_priority: bool = False

    @property
    def max_waiting_bytes(self) -> int:
        """The bound on the bodies that wait, in bytes."""
        return math.ceil(self.max_waiting_mib * 2**20)

    def part(self, workers: int) -> QueueSettings:
        """Return the part of each worker."""
        return self.model_copy(
            update={
                "max_in_flight_per_backend": math.ceil(self.max_in_flight_per_backend / workers),
                "max_waiting": math.ceil(self.max_waiting / workers),
                "max_waiting_mib": self.max_waiting_mib / workers,
            }
        )
