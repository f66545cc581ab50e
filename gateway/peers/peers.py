"""The peers of a gateway process: the other processes that serve the same pool, in this gateway or in others.

Each process reports its requests in flight, its use of keys, and the replicas that it ejected or that an operator
drained there. It also reports which replicas hold its stored responses, and where it sent prompts, since these are now
cached. No clocks are compared: a peer is alive while the number of its report grows, at least once a second.
"""

from __future__ import annotations

import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit
from uuid import uuid4

from backends.backend import Backend
from backends.health import Drain, Ejected
from backends.pool import Pool
from gateway.peers.report import Draining, Ejection, Report, SentPrompt, decode
from gateway.relay.limits import Limits
from gateway.relay.waiting.shares import FairShares
from gateway.routing.keys import Keyring
from gateway.routing.model import Model
from gateway.routing.router import Sent
from gateway.routing.sticky import Home, ResponseLocations

HEARTBEAT_S = 1.0
"""A process reports at least this often."""

SILENT_S = 3.0
"""A peer without a new report for this long is forgotten."""

GONE_S = 60.0
"""The report of a peer that was silent for this long is removed."""

_RESPONSES_S, _MOST_RESPONSES = 2.0, 1000
"""How long, and how many, locations of stored responses are reported."""

MOST_PROMPTS = 64
"""Most new prompts in a report: the last ones sent."""

_REPORTS_OF_A_PROMPT = 3
"""Reports that repeat a prompt, so that a reader may miss two of them."""

_REPORTS_TO_COUNT = 2
"""Reports after which a process counts, so that leftovers of one that has exited do not."""


@dataclass(slots=True)
class _Peer:
    """What is known about a peer."""

    number: int
    heard_s: float
    counts: bool = False  # whether its last report counts: it has reported twice, and lately
    was_counted: bool = False  # whether the last `settle` counted it
    in_flight: dict[str, int] = field(default_factory=dict)
    ejections: dict[str, int] = field(default_factory=dict)  # numbers of its current ejections, by replica
    answered: dict[str, tuple[float, float]] = field(default_factory=dict)


class Peers:
    """Reports the state of this process, and applies the reports of its peers."""

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        locations: ResponseLocations,
        sent: Sent,
        clock: Callable[[], float] = time.monotonic,
        host: str | None = None,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._locations = locations
        self._sent = sent  # prompts sent since the last report
        self._keyring = Keyring([])  # the keys whose use counts
        self._models: Mapping[str, Model] = {}
        self._shares: Mapping[str, FairShares] = {}  # of the models with a queue
        self._clock = clock  # returns monotonic seconds
        # Name of this host: addresses such as 127.0.0.1 name other replicas on other hosts.
        self._host = platform.node() if host is None else host
        self.writer = uuid4().hex
        self.number = 0
        self.report = b""  # the last report, encoded; empty before the first `update`
        self._reported_s = 0.0
        # Whether each place in reach has got a report since the limits were last divided.
        self._told: dict[object, bool] = {}
        self._greetings = _REPORTS_TO_COUNT  # reports yet to be written even if nothing has changed
        self._reported: tuple[object, ...] = ()
        self._ejections: dict[str, tuple[int, float, str]] = {}  # number, end, reason
        self._ejection_count = 0
        self._peers: dict[str, _Peer] = {}
        self._ids: dict[str, str] = {}  # of replicas, by URL
        self._answered: dict[str, tuple[float, float]] = {}  # tokens and steps from all peers so far, by replica
        self._draining: dict[str, Draining] = {}
        self._responses: deque[tuple[float, str, Home]] = deque(maxlen=_MOST_RESPONSES)  # time, id, home
        self._response_count = 0
        self._prompts: deque[list[SentPrompt]] = deque(maxlen=_REPORTS_OF_A_PROMPT)

    def follow(self, keyring: Keyring, models: Mapping[str, Model], shares: Mapping[str, FairShares]) -> None:
        """Replace the keys, models and shares; forget replicas that have left."""
        self._keyring, self._models, self._shares = keyring, models, shares
        self._ids.clear()
        present = {self._id(backend) for backend in self._pool}
        self._draining = {replica: said for replica, said in self._draining.items() if replica in present}
        self._answered = {replica: sums for replica, sums in self._answered.items() if replica in present}

    def set_drained(self, backend: Backend, *, drained: bool) -> None:
        """Drain or resume a replica, here and at the peers."""
        number = 1 + max((said.number for said in self._draining.values()), default=0)
        self._drain(self._id(backend), Draining(number, drained))

    def update(self) -> None:
        """Write a new report if the state has changed, or the last one is a second old."""
        now_s = self._clock()
        while self._locations.new:
            self._response_count += 1
            self._responses.append((now_s, *self._locations.new.popleft()))
        in_flight = {self._id(backend): backend.in_flight for backend in self._pool if backend.in_flight}
        keys = self._limits.report()
        steady = {key: use.steady() for key, use in keys.items()}
        state = (in_flight, steady, self._ejection_count, self._response_count, dict(self._draining))
        is_new_to_some, self._greetings = self._greetings > 0, max(0, self._greetings - 1)
        if not is_new_to_some and not self._sent and state == self._reported and now_s - self._reported_s < HEARTBEAT_S:
            return
        self._reported, self._reported_s = state, now_s
        self.number += 1
        self._ejections = {replica: found for replica, found in self._ejections.items() if found[1] > now_s}
        ejected = {
            replica: Ejection(number, round(end_s - now_s, 3), reason)
            for replica, (number, end_s, reason) in self._ejections.items()
        }
        answered = {
            self._id(one): (one.answered_tokens, one.answered_steps) for one in self._pool if one.answered_steps
        }
        while self._responses and now_s - self._responses[0][0] > _RESPONSES_S:
            self._responses.popleft()
        responses = {response: home for _, response, home in self._responses}
        sent = [SentPrompt(self._id(one), each.prefix, each.prefix_tokens) for one, each in self._sent]
        self._prompts.appendleft(sent)
        self._sent.clear()
        self.report = Report(
            self.writer,
            self.number,
            in_flight,
            keys,
            ejected,
            answered,
            self._draining,
            responses,
            [*self._prompts],
            {name: shares.totals_s for name, shares in self._shares.items()},
        ).encode()

    def receive(self, data: bytes) -> None:
        """Apply a report of a peer, unless it was applied before."""
        report = decode(data)
        if report.writer == self.writer:
            return
        peer = self._peers.get(report.writer)
        if peer is None:  # its process may have exited: the next report will tell
            self._peers[report.writer] = _Peer(report.number, self._clock(), answered=report.answered)
            self._greetings = _REPORTS_TO_COUNT
            return
        if report.number <= peer.number:
            return
        is_new = not peer.counts
        self._learn_prompts(report.prompts[: report.number - peer.number])
        peer.number, peer.heard_s, peer.counts, peer.in_flight = report.number, self._clock(), True, report.in_flight
        self._add_answered(peer, report.answered)
        for model, totals_s in report.served_s.items():
            if (shares := self._shares.get(model)) is not None:
                known = {
                    key: total_s for key, total_s in totals_s.items() if self._keyring.with_id(key.partition(" ")[0])
                }
                shares.hear(report.writer, known)
        for key, use in report.keys.items():
            if (client := self._keyring.with_id(key)) is not None:
                self._limits.hear(report.writer, client, use, is_new=is_new)
        self._limits.no_longer_uses(report.writer, report.keys.keys())
        for replica, ejection in report.ejected.items():
            if ejection.number > peer.ejections.get(replica, 0):
                self._apply(replica, ejection)
        peer.ejections = {replica: ejection.number for replica, ejection in report.ejected.items()}
        # Drop replicas that have left: else two peers would repeat them to each other forever.
        present = {self._id(backend) for backend in self._pool} if report.draining else set()
        for replica, said in report.draining.items():
            heard = self._draining.get(replica)
            if replica in present and (heard is None or said.number > heard.number):
                self._drain(replica, said)
        for response, home in report.responses.items():
            self._locations.remember(response, home)

    def settle(self, place: object, *, is_reported: bool, is_out: bool) -> int:
        """Forget silent peers, and count the others in load and limits; return their number.

        Parameters
        ----------
        place
            Where reports were exchanged.
        is_reported, is_out
            Whether the last report has been written there, and whether it is out of reach.
        """
        now_s = self._clock()
        counts: Counter[str] = Counter()
        recounted: Counter[str] = Counter()
        for writer, peer in list(self._peers.items()):
            if peer.counts and now_s - peer.heard_s > SILENT_S:
                peer.counts = False
                self._limits.forget(writer)
                for shares in self._shares.values():
                    shares.forget(writer)
            elif now_s - peer.heard_s > 2.0 * GONE_S:
                del self._peers[writer]
            if peer.counts:
                counts.update(peer.in_flight)
            if peer.counts is not peer.was_counted:
                peer.was_counted = peer.counts
                (recounted.update if peer.counts else recounted.subtract)(peer.in_flight)
        for backend in self._pool:
            replica = self._id(backend)
            answered = self._answered.get(replica, (0.0, 0.0))
            self._pool.watch(backend).hear_peers(counts[replica], answered, recounted=recounted[replica])
        alive = sum(peer.counts for peer in self._peers.values())
        if is_reported:
            self._told[place] = True
        elif is_out:
            self._told.pop(place, None)
        if all(self._told.values()) or not alive:
            self._limits.divide(alive)
            self._told = dict.fromkeys(self._told, False)
        return alive

    def gone(self) -> list[str]:
        """Return the peers whose last report can be removed."""
        now_s = self._clock()
        return [writer for writer, peer in self._peers.items() if now_s - peer.heard_s > GONE_S]

    def _add_answered(self, peer: _Peer, answered: dict[str, tuple[float, float]]) -> None:
        """Add what a peer has answered since its previous report."""
        for replica, (tokens, steps) in answered.items():
            tokens_before, steps_before = peer.answered.get(replica, (0.0, 0.0))
            if tokens >= tokens_before and steps >= steps_before:  # else another replica is at that address
                sums = self._answered.get(replica, (0.0, 0.0))
                self._answered[replica] = sums[0] + tokens - tokens_before, sums[1] + steps - steps_before
        peer.answered = answered

    def _apply(self, replica: str, ejection: Ejection) -> None:
        for backend in self._pool:
            if self._id(backend) == replica and ejection.left_s > 0.0:
                reason = f"{ejection.reason} (seen by another gateway process)"
                self._pool.report(backend, Ejected(ejection.left_s, reason))

    def _learn_prompts(self, reports: list[list[SentPrompt]]) -> None:
        """Pass the sent prompts to the policies, latest first."""
        backends = {self._id(backend): backend for backend in self._pool} if any(reports) else {}
        for prompt in (each for report in reversed(reports) for each in report):
            backend = backends.get(prompt.replica)
            if backend is not None and backend.model in self._models and len(prompt.prefixes) == len(prompt.lengths):
                self._models[backend.model].sent_elsewhere(backend.name, prompt.prefixes, prompt.lengths)

    def _drain(self, replica: str, said: Draining) -> None:
        self._draining[replica] = said
        for backend in self._pool:
            if self._id(backend) == replica:
                self._pool.report(backend, Drain(said.drained))

    def note_ejection(self, backend: Backend, duration_s: float, reason: str) -> None:
        """Report that this process has ejected a replica."""
        self._ejection_count += 1
        self._ejections[self._id(backend)] = (self._ejection_count, self._clock() + duration_s, reason)

    def _id(self, backend: Backend) -> str:
        """Return a replica's name for all gateways: its address, with the host if it is valid only there."""
        name = self._ids.get(backend.url)
        if name is None:
            name = f"{self._host} {backend.url}" if _is_local(backend.url) else backend.url
            self._ids[backend.url] = name
        return name


def _is_local(url: str) -> bool:
    """Return whether an address is valid only on its own host.

    Examples
    --------
    >>> _is_local("http://127.0.0.1:8000"), _is_local("unix:/run/vllm.sock"), _is_local("http://vllm-1:8000")
    (True, True, False)
    """
    host = urlsplit(url).hostname
    if host is None or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
