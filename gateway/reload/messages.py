"""Messages between the main process and its workers: reloads, and what workers count for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.backend import Backend
from backends.background import Work
from gateway.config.settings import PoolSettings
from gateway.reload.reloader import Cause, Outcome

if TYPE_CHECKING:
    from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class PrepareChange:
    """To a worker: prepare other settings and replicas, without changing anything yet."""

    number: int
    settings: PoolSettings
    backends: Sequence[Backend]
    admin_digest: bytes


@dataclass(frozen=True, slots=True)
class ChangePrepared:
    """From a worker: the change is prepared, or why it cannot be."""

    number: int
    worker: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EndChange:
    """To a worker: put what was prepared into effect, or drop it."""

    number: int
    commit: bool


@dataclass(frozen=True, slots=True)
class ReloadWanted:
    """From a worker: reload, as a client asks for at `/admin/reload`."""

    worker: int
    request: int
    dry_run: bool
    restart: str | None


@dataclass(frozen=True, slots=True)
class ReloadAnswered:
    """To the worker: what has come of it. Without an outcome `lines` have changed, else `problem` says why not."""

    request: int
    lines: list[str]
    outcome: Outcome | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReloadCounted:
    """To one worker: count a reload in the metrics, which the main process does not have."""

    cause: Cause
    outcome: Outcome

    def count(self, metrics: Metrics) -> None:
        """Count it."""
        metrics.count_reload(self.cause, self.outcome)


@dataclass(frozen=True, slots=True)
class DiscoveryCounted:
    """To one worker: count an answer of a source of replicas."""

    model: str
    source: str
    outcome: str
    replicas: int

    def count(self, metrics: Metrics) -> None:
        """Count it."""
        metrics.count_discovery(self.model, self.source, self.outcome, self.replicas)


@dataclass(frozen=True, slots=True)
class FailureCounted:
    """To one worker: count a failure of work beside the requests in the main process."""

    work: Work

    def count(self, metrics: Metrics) -> None:
        """Count it."""
        metrics.count_background(self.work)


Counted = ReloadCounted | DiscoveryCounted | FailureCounted
ToParent = ChangePrepared | ReloadWanted
ToWorker = PrepareChange | EndChange | ReloadAnswered | ReloadCounted | DiscoveryCounted | FailureCounted
