"""Follows the sources of all models, and keeps what they have found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence

from backends import background
from gateway.config.settings import DiscoverSettings, PoolSettings
from gateway.discovery.source import MOST_REPLICAS, Outcome, Replica, ReplicaSource, SourceError

log = logging.getLogger(__name__)

_FIRST_S = 2.0
"""How long to wait for the first answer of a source."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""Bounds on the pause after a source fails; it doubles each time."""

Found = dict[tuple[str, str], Sequence[Replica]]
"""Replicas by model and name of the source."""


def source_of(settings: DiscoverSettings) -> ReplicaSource:
    """Return the source that some settings name."""
    if settings.kubernetes is not None:
        from gateway.discovery.kubernetes import KubernetesSource

        where = settings.kubernetes
        return KubernetesSource(where.service, where.namespace, where.port)
    if settings.inference_pool is not None:
        from gateway.discovery.inference_pool import InferencePoolSource

        pool = settings.inference_pool
        return InferencePoolSource(pool.name, pool.namespace, settings.of_unlabelled)
    from gateway.discovery.resolver import DnsSource  # an extra

    if settings.dns is not None:
        name, _, port = settings.dns.rpartition(":")
        return DnsSource(name, int(port))
    assert settings.srv is not None
    return DnsSource(settings.srv, None)


class _Followed:
    """A source that is followed, and its findings.

    An answer without replicas, or a failure, changes nothing: probes show which replicas are up.
    """

    def __init__(
        self,
        model: str,
        name: str,
        source: ReplicaSource,
        on_change: Callable[[], None],
        on_end: OnAnswer,
        before: Sequence[Replica],
    ) -> None:
        self.replicas = before  # at first, those that its predecessor found
        self.has_answered = asyncio.Event()
        self._where = f"models.{model}.discover.{name}"
        self._labels = model, name
        self._source = source
        self._on_change = on_change
        self._on_end = on_end
        self._problem = ""
        self._pause_s = _PAUSE_S
        self.task = background.keep_running("discovery", self._follow, of=self._where)

    async def _follow(self) -> None:
        while True:
            try:
                await self._source.follow(self._report)
            except SourceError as error:
                self._note("failed", str(error))
            except Exception:
                log.exception("%s has failed", self._where)
                self._note("failed", "a defect")
            if background.is_cancelled():
                return
            self.has_answered.set()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _report(self, replicas: Collection[Replica]) -> None:
        self.has_answered.set()
        self._pause_s = _PAUSE_S
        if not replicas:
            self._note("nothing", "has no replicas")
            return
        if len(replicas) > MOST_REPLICAS:
            replicas = sorted(replicas)[:MOST_REPLICAS]
            log.warning("%s has found more than %d replicas: the others are left out", self._where, MOST_REPLICAS)
        if self._problem:
            log.info("%s answers again", self._where)
        self._problem = ""
        changed, self.replicas = self.replicas != tuple(replicas), tuple(replicas)
        self._on_end(*self._labels, "found", len(self.replicas))
        if changed:
            log.info("%s has found %d replicas", self._where, len(self.replicas))
            self._on_change()

    def _note(self, outcome: Outcome, problem: str) -> None:
        if problem != self._problem:
            kept = f"; the {len(self.replicas)} replicas found before are kept" if self.replicas else ""
            log.warning("%s: %s%s", self._where, problem, kept)
        self._problem = problem
        self._on_end(*self._labels, outcome, len(self.replicas))


OnAnswer = Callable[[str, str, Outcome, int], None]


class Discovery:
    """Follows the sources of the settings."""

    def __init__(
        self,
        on_change: Callable[[], None],
        on_answer: OnAnswer,
        make: Callable[[DiscoverSettings], ReplicaSource] = source_of,
    ) -> None:
        self._on_change = on_change  # called when a source has found other replicas
        # Called with model, name of the source, outcome and number of replicas after each answer.
        self._on_answer = on_answer
        self._make = make  # returns the source of some settings
        self._followed: dict[tuple[str, str, str], _Followed] = {}

    async def start(self, settings: PoolSettings) -> None:
        """Follow the new sources in the settings, and wait a moment for their first answers."""
        begun: list[_Followed] = []
        before = {key[:2]: each.replicas for key, each in self._followed.items()}
        for key, discover in _sources(settings).items():
            if key not in self._followed:
                source = self._make(discover)
                known = before.get(key[:2], ())
                followed = self._followed[key] = _Followed(*key[:2], source, self._on_change, self._on_answer, known)
                begun.append(followed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                for each in begun:
                    await each.has_answered.wait()

    def keep(self, settings: PoolSettings | None) -> None:
        """Stop following sources that are not in these settings."""
        kept = set() if settings is None else _sources(settings).keys()
        for key in self._followed.keys() - kept:
            self._followed.pop(key).task.cancel()

    def found(self, settings: PoolSettings) -> Found:
        """Return the replicas that the sources of these settings have found."""
        return {key[:2]: self._followed[key].replicas for key in _sources(settings) if key in self._followed}


def _sources(settings: PoolSettings) -> dict[tuple[str, str, str], DiscoverSettings]:
    """Return the settings of all sources, by model, name, and where they look."""
    return {
        (model, name, discover.where): discover
        for model, model_settings in settings.models.items()
        for name, discover in model_settings.discover.items()
    }
