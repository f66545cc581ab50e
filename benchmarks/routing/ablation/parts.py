"""`learned` with one part switched off, for `benchmarks.routing.ablation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from backends.backend import Candidate
from backends.draft_schedule import DraftSchedule
from backends.simulator.engine.replica import SimulatedReplica
from policies.features.request import RequestFeatures
from policies.learned.cost import Delay
from policies.learned.known import Known
from policies.learned.policy import Learned
from policies.learned.replica import KnownReplica
from policies.learned.settings import LearnedSettings
from policies.learned.table import Kinds, RequestKind


class Part(NamedTuple):
    """How to switch a part off: by settings, and by a change of the policy."""

    settings: Mapping[str, Any] = {}
    change: Callable[[Learned], object] = id


class Alike(Kinds):
    """Kinds in which some features are the same for all requests."""

    def __init__(self, **same: Any) -> None:
        super().__init__()
        self._same = same

    def of(self, request: RequestFeatures) -> RequestKind:
        """Return the kind of a request."""
        return super().of(replace(request, **self._same))


def without(seed: int, *parts: str) -> Learned:
    """Return `learned` without some of its parts."""
    settings: dict[str, Any] = {"seed": seed}
    for part in parts:
        settings |= PARTS[part].settings
    policy = Learned(LearnedSettings.model_validate(settings))
    for part in parts:
        PARTS[part].change(policy)
    return policy


class _Lone(dict[str, int]):
    """Numbers of replicas by arm, as if each were the only one."""

    def get(self, _arm: str, _default: object = None) -> int:
        """Return one."""
        return 1


def _set(owner: object, name: str, value: object) -> None:
    """Replace what an object has, and raise an error if it has no such thing."""
    getattr(owner, name)
    setattr(owner, name, value)


def _alike(**same: Any) -> Part:
    return Part(change=lambda policy: _set(policy.known, "kinds", Alike(**same)))


def _known(change: Callable[[Known], object]) -> Part:
    return Part(change=lambda policy: change(policy.known))


def _replicas(change: Callable[[KnownReplica, Known], object]) -> Part:
    """Change each replica when the policy meets it."""

    def change_all(policy: Learned) -> None:
        known = policy.known
        of = known.replica

        def changed(candidate: Candidate) -> KnownReplica:
            is_new = candidate.name not in known.replicas
            replica = of(candidate)
            if is_new:
                change(replica, known)
            return replica

        known.replica = changed  # type: ignore[method-assign]

    return Part(change=change_all)


def _one_line(replica: KnownReplica, known: Known) -> None:
    """Use the pool's factors for a replica; scaling all step times alike would change no choice."""
    learn = replica.learn
    replica.learn = lambda factors, observed: learn(known._usual, observed)  # type: ignore[method-assign]


def _take_k_as_fixed(known: Known) -> None:
    of = known.replica

    def unaware(candidate: Candidate) -> KnownReplica:
        assert isinstance(candidate, SimulatedReplica)
        candidate.draft_schedule = DraftSchedule(candidate.num_speculative_tokens)
        return of(candidate)

    known.replica = unaware  # type: ignore[method-assign]


def _expect_no_arrivals(known: Known) -> None:
    delays = known.delays

    def alone(request: RequestFeatures, *rest: Any, **named: Any) -> list[Delay]:
        return delays(replace(request, qps=0.0), *rest, **named)

    known.delays = alone  # type: ignore[method-assign]


def _as(value: float) -> Callable[..., float]:
    return lambda *_: value


PARTS: dict[str, Part] = {
    "temperature in the table": _alike(temperature=0.0),
    "overlap": _alike(overlap=0.0),
    "workload": _alike(workload=""),
    "length of the prompt": _alike(prompt_tokens=300),
    "template": _alike(template=""),
    "client": _alike(client=""),
    "table of tokens per step": _known(lambda known: _set(known.per_step, "around", lambda _: ())),
    "table of lengths": _known(lambda known: _set(known.lengths, "around", lambda _: ())),
    "line of each replica": _replicas(_one_line),
    "time of prompts": _replicas(lambda replica, _: _set(replica, "learn_prompt", _as(0.0))),
    "prefix memory": _known(lambda known: _set(known.prefixes, "holders", lambda _: [])),
    "what is evicted": _replicas(lambda replica, _: _set(replica.prefixes, "recomputed", _as(0.0))),
    "replicas of one method apart": _known(lambda known: _set(known, "_of_arm", _Lone())),
    "shadow drafting": Part({"shadow_drafting": {"sample": 0}}),
    "k by batch size": _known(_take_k_as_fixed),
    "drafters' limits": _replicas(lambda replica, _: _set(replica.reach, "read", _as(0.0))),
    "detector": Part({"outlier_ejection": False}),
    "control group": Part({"guardrail": {"share": 0}}),
    "delay of others": Part(change=lambda policy: _set(policy.sum, "_others", 0.0)),
    "prompts that come meanwhile": _known(_expect_no_arrivals),
}
