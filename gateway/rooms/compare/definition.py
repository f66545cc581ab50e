"""The comparison that an operator requests, as stored and shared by all gateways of a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, combinations
from typing import Any, Self
from uuid import uuid4

from pydantic import Field, ValidationError, model_validator

from backends.backend import Backend
from backends.health import SERVING, State
from backends.speculation import MODELLESS, SCHEDULE_KEY
from backends.validation import did_you_mean
from gateway.rooms.compare.settings import ComparisonSettings
from policies.arm import arm_named, arm_of
from policies.experiment.evidence import Evidence
from policies.experiment.experiment import Experiment
from policies.experiment.plan import Plan
from policies.experiment.verdict import Stage
from policies.policy import Policy, policies
from policies.roles import Learner
from policies.statistics import MAX_KEYS

_THERE = SERVING | {State.DRAINING}
_SHORTEST_S, _LONGEST_S = 10.0, 3600.0
_WEEK_S, _BESIDE = 7 * 86_400.0, 2  # besides the arms: replicas outside, and blocks as usual
MANY = 12  # blocks; with fewer, long requests of the first may not have ended
_LEAST_BLOCKS = 8  # the first counts in part, some are as usual, and the last still has requests in flight
_TIMES = 10.0  # times the mean time of a request; `policies.experiment.blocks` needs eight


class WrongArmsError(ValueError):
    """Raised if replicas to compare do not exist, or the arms overlap."""


class Definition(ComparisonSettings):
    """A comparison that has begun."""

    id: str = Field(default_factory=lambda: uuid4().hex[:12])
    block_s: float
    shorter_s: list[float] = Field(default_factory=list)  # earlier lengths of its blocks, which still count
    is_fitted: bool = False  # whether blocks are fitted to the requests, and may be refitted
    began_s: float
    ended_s: float | None = None
    stage: Stage = Stage.RUNNING
    replicas: dict[str, list[str]]  # of each arm, as of its start
    groups: list[list[str]] = Field(default_factory=list)  # of replicas that change arms together
    served: dict[str, list[str]] = Field(default_factory=dict)  # method and k of each arm's replicas, as of its start
    versions: list[str] = Field(default_factory=list)  # of vLLM, reported at its start by replicas of its arms
    drafter: dict[str, Any] | None = None  # for depths: the draft model, and the calibration of its passes
    result: dict[str, Any] = Field(default_factory=dict)  # the result at its end

    @model_validator(mode="after")
    def _has_arms(self) -> Self:
        if len(self.replicas) < 2 or not all(self.replicas.values()):
            raise ValueError("a comparison has two arms with a replica each")
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether the same replicas serve as one arm after another."""
        return bool(self.depths or self.policies)

    def compared(self) -> frozenset[tuple[str, ...]]:
        """Return what distinguishes its arms from those of other comparisons."""
        arms = zip(self.replicas, self.served.values(), strict=False)
        return frozenset((arm, *served) if self.takes_turns else tuple(served) for arm, served in arms)

    def is_of(self, backend: Backend, arm: str) -> bool:
        """Return whether a replica serves like those of an arm did."""
        return arm_of(backend) in self.served.get(arm, ())

    def still_holds(self, backends: Sequence[Backend], policy: str, better: str) -> bool:
        """Return whether its result applies to the pool: it has replicas of each arm, or a worse policy chooses."""
        if self.has_other_engines(backends):
            return False
        if self.policies:
            return policy in self.policies and policy != better
        if len(self.compared()) == 1:  # such as two heads: only the pool file tells them apart
            best = [each.speculative_config for each in backends if each.name in self.replicas[better]]
            names = [*chain(*self.replicas.values())]
            return any(each.speculative_config not in best for each in backends if each.name in names)
        return all(any(self.is_of(each, arm) for each in backends) for arm in self.replicas)

    def advises(self, backends: Sequence[Backend], better: str, change: str) -> bool:
        """Return whether a change is one: of depths, the one that replicas have was compared, and was worse."""
        names = {*chain(*self.replicas.values())}
        present = {each.num_speculative_tokens for each in backends if each.name in names}
        is_better = present == {depth for depth, arm in zip(self.depths, self.replicas, strict=False) if arm == better}
        return not self.depths or (present <= {*self.depths} and (not is_better or SCHEDULE_KEY in change))

    def has_other_engines(self, backends: Sequence[Backend]) -> bool:
        """Return whether a replica that serves like an arm has a version of vLLM that none of them had."""
        now = {each.engine.said.version for each in backends if any(self.is_of(each, arm) for arm in self.replicas)}
        return bool(self.versions) and not now <= {"", *self.versions}

    def _served_as(self, backend: Backend) -> list[str]:
        """Return the method and k of a replica's arm at the start; empty for a replica in no arm."""
        arms = [arm for arm, names in self.replicas.items() if backend.name in names]
        return [each for arm in arms for each in self.served.get(arm, ())]

    def unchanged(self, backends: Sequence[Backend]) -> list[Backend]:
        """Return the replicas without those of an arm that serve differently than at its start.

        One that contradicts the pool file stays: nobody has changed its settings.
        """
        before = [(each, self._served_as(each)) for each in backends]
        return [each for each, served in before if not served or each.contradiction or arm_of(each) in served]

    def changed(self, backends: Sequence[Backend], policy: str) -> str:
        """Return what serves differently than at its start, or is gone; empty if nothing."""
        if self.policies:
            is_lost = any(name != policy and other_policy(name) is None for name in self.policies)
            is_another = is_lost or policy not in self.policies
            return f"{policy} is the policy now" if is_another else ""
        names = {each.name for each in backends}
        for arm, members in self.replicas.items():
            if names.isdisjoint(members):
                return f"no replica of {arm} is in the pool any more"
        for each in backends:
            served, now = self._served_as(each), arm_of(each)
            if served and each.health.state in SERVING and not any(_may_be(now, before) for before in served):
                return f"{each.name} serves as {now} now"
        if self.has_other_engines([each for each in backends if self._served_as(each)]):  # others do not matter
            return f"replicas have another vLLM now than {' and '.join(self.versions)}"
        return ""

    def away(self, backends: Sequence[Backend]) -> str:
        """Return a sentence, after a space, for each arm without a replica that is up; empty if there is none."""
        up = {each.name for each in backends if each.health.state in SERVING}
        return "".join(f" No replica of {arm} is up." for arm, names in self.replicas.items() if up.isdisjoint(names))

    def document(self) -> dict[str, Any]:
        """Return the comparison with its result, for `/admin/compare`."""
        return self.model_dump(mode="json", exclude={"replicas", "result", "served", "shorter_s"}) | self.result

    def plan(self) -> Plan:
        """Return its plan of blocks."""
        groups = () if self.policies else tuple(map(frozenset, self.groups or self.replicas.values()))
        explore, usual = 0.0 if self.policies else self.explore, self.usual and not self.policies
        plan: Plan | None = None
        for block_s in [*self.shorter_s, self.block_s]:
            id_, arms = f"{self.id} {block_s:g}", tuple(self.replicas)
            plan = Plan(id_, arms, groups, self.takes_turns, block_s, explore, usual, plan)
        assert plan is not None
        return plan

    def with_longer_blocks(self, block_s: float, blocks: int) -> Definition:
        """Return it with longer blocks. The `blocks` so far still count if they are many."""
        shorter_s = [*self.shorter_s, self.block_s] if blocks >= MANY else []
        return self.model_copy(update={"block_s": block_s, "shorter_s": shorter_s})


def begun(
    question: ComparisonSettings,
    backends: Sequence[Backend],
    policy: str,
    began_s: float,
    mean_s: float | None = None,
    calibration: str = "",
) -> Definition:
    """Return a comparison of the requested arms.

    Parameters
    ----------
    backends
        The current replicas.
    policy
        Name of the policy that chooses among them.
    mean_s
        Mean seconds of a request so far; None if there was none.
    calibration
        Name of the calibration that has the passes of their drafter; empty if none is configured.

    Raises
    ------
    WrongArmsError
        If an arm has no replica, an unknown one, or one that the other has too; if depths or policies cannot take
        turns; if there is no time for a result.
    """
    named = [bool(question.a or question.b), bool(question.depths), bool(question.policies)]
    if sum(named) != 1:
        raise WrongArmsError("name either two arms, or depths, or policies")
    if question.depths:
        arms = _depths(question, backends)
    elif question.policies and len(backends) < 2:
        raise WrongArmsError("policies choose among replicas, and there is one")
    elif question.policies:
        arms = {name: [each.name for each in backends] for name in _turns_of(question.policies, policy)}
    else:
        arms = _apart(question, backends)
    for arm, names in arms.items():
        if not any(each.health.state in _THERE for each in backends if each.name in names):
            raise WrongArmsError(f"no replica of {arm} is up")
    served = {
        arm: sorted({_arm_at_start(each) for each in backends if each.name in names}) for arm, names in arms.items()
    }
    alike = {*chain(*served.values())}
    versions = {each.engine.said.version for each in backends if arm_of(each) in alike}
    asked = question.model_dump(include={*ComparisonSettings.model_fields})
    block_s = max(question.block_s or block_for(mean_s), _shortest_s(question, len(arms)))
    if question.for_s is not None and question.for_s < _LEAST_BLOCKS * block_s:
        least = f"{_LEAST_BLOCKS * block_s:g} s at least, {_LEAST_BLOCKS} blocks of time of {block_s:g} s"
        raise WrongArmsError(f"{question.for_s:g} s are too short for any result; it takes {least}, and often far more")
    asked |= {"block_s": block_s, "is_fitted": question.block_s is None}
    known = {"replicas": arms, "groups": _groups(question, arms), "served": served, "versions": sorted(versions - {""})}
    return Definition(**asked, **known, began_s=began_s, drafter=_drafter(question, backends, calibration))


def block_for(mean_s: float | None) -> float:
    """Return the seconds of a block for requests of a mean time; a short one while that is unknown."""
    return min(_LONGEST_S, max(_SHORTEST_S, math.ceil(_TIMES * (mean_s or 0.0))))


def longer_block_s(experiment: Experiment, evidence: Evidence) -> float | None:
    """Return the seconds of a longer block that fits the requests; None if the current one fits, or is the longest."""
    needed_s = experiment.needed_block_s() or evidence.needed_block_s()
    block_s = block_for(max(experiment.mean_s, (needed_s or 0.0) / _TIMES))
    return block_s if needed_s is not None and block_s > experiment.plan.block_s else None


def _shortest_s(question: ComparisonSettings, arms: int) -> float:
    """Return the shortest block with which all blocks of a comparison, or of a week without an end, are kept."""
    return min(_LONGEST_S, math.ceil((question.for_s or _WEEK_S) * (arms + _BESIDE) / MAX_KEYS))


def next_question(
    settings: ComparisonSettings, backends: Sequence[Backend], past: Sequence[Definition]
) -> ComparisonSettings:
    """Return a comparison of the two methods that were compared longest ago.

    Raises
    ------
    WrongArmsError
        If all replicas that are up have the same method.
    """
    began_s = {frozenset(map(method_of, chain(*each.served.values()))): each.began_s for each in reversed(past)}
    pairs = [*combinations(sorted({each.method.value for each in backends if each.health.state in SERVING}), 2)]
    if not pairs:
        raise WrongArmsError("all replicas that are up have the same method")
    pair = min(pairs, key=lambda each: began_s.get(frozenset(each), 0.0))
    return settings.model_copy(update={"a": pair[0], "b": pair[1]})


def method_of(arm: str) -> str:
    """Return the method of an arm as `policies.arm` writes it."""
    return arm.partition(":")[0]


def _arm_at_start(backend: Backend) -> str:
    """Return the arm of a replica; by the pool file if it is not serving: its figures may be of an earlier engine."""
    said = backend.declared
    return arm_of(backend) if backend.health.state in SERVING else arm_named(said.method, said.schedule.k)


def _may_be(one: str, other: str) -> bool:
    """Return whether two arms of `policies.arm` may be the same; the k of an engine is unknown at first."""
    (method, _, k), (other_method, _, other_k) = one.partition(":"), other.partition(":")
    return method == other_method and (k == other_k or "0" in {k, other_k})


def _apart(question: ComparisonSettings, backends: Sequence[Backend]) -> dict[str, list[str]]:
    arms = {text: _members(text, backends) for text in (question.a, question.b)}
    if len(arms) < 2:
        raise WrongArmsError("a and b are the same; name different replicas, or different methods")
    shared = set(arms[question.a]) & set(arms[question.b])
    if shared:
        raise WrongArmsError(f"{', '.join(sorted(shared))} would be in both arms; each replica can be in one")
    return arms


def _depths(question: ComparisonSettings, backends: Sequence[Backend]) -> dict[str, list[str]]:
    able = [each for each in backends if each.draft_depth]
    if len(set(question.depths)) < 2:
        raise WrongArmsError("name two depths at least, such as 0,3")
    if not able:
        raise WrongArmsError("no replica has draft_depth: true; docs/configuration.md says how to come by it")
    most = max(each.num_speculative_tokens for each in able)
    if max(question.depths) > most:
        raise WrongArmsError(f"these replicas draft {most} tokens at most, as they were started")
    return {f"k = {depth}": [each.name for each in able] for depth in dict.fromkeys(question.depths)}


def _drafter(question: ComparisonSettings, backends: Sequence[Backend], calibration: str) -> dict[str, Any] | None:
    models = [each for each in backends if each.draft_depth and each.method not in MODELLESS]
    if not question.depths or not models:
        return None
    return {"method": models[0].method.value, "k": models[0].num_speculative_tokens, "calibration": calibration}


def _turns_of(asked: Sequence[str], present: str) -> list[str]:
    """Return the policies that take turns: the current one, and others that need neither settings nor a past."""
    names, known = [*dict.fromkeys(asked)], policies()
    if present not in names or len(names) < 2:
        raise WrongArmsError(f"name the present policy and another one, such as {present},least_loaded")
    for name in names:
        if name not in known:
            raise WrongArmsError(f"there is no policy {name[:100]!r}; {did_you_mean(name, known) or ', '.join(known)}")
        if name != present and other_policy(name) is None:
            raise WrongArmsError(f"{name} needs settings, or all requests to learn from, so it cannot take turns")
    return names


def other_policy(name: str) -> Policy | None:
    """Return a policy to take turns with the current one; None if it needs settings or learns from requests."""
    kind = policies()[name]
    try:
        return None if issubclass(kind, Learner) else kind(kind.Settings())
    except ValidationError:
        return None


def _groups(question: ComparisonSettings, arms: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the groups of replicas that have the same depth at a time: as many as there can be different depths."""
    if not question.depths:
        return []
    names = next(iter(arms.values()))
    count = min(len(arms), len(names))
    return [names[group::count] for group in range(count)]


def _members(text: str, backends: Sequence[Backend]) -> list[str]:
    found: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        members = [each.name for each in backends if _is_named(each, word)]
        if not members:
            known = dict.fromkeys([*(each.name for each in backends), *(each.method.value for each in backends)])
            hint = did_you_mean(word, known) or f"there are {', '.join(known)}"
            raise WrongArmsError(f"no replica has the name, the method or the source {word[:100]!r}; {hint}")
        found += [name for name in members if name not in found]
    if not found:
        raise WrongArmsError("an arm has no replica; name both, a and b, by replicas or by a method")
    return found


def _is_named(backend: Backend, word: str) -> bool:
    source, _, _ = backend.name.rpartition("/")
    return word in {backend.method.value, source} or fnmatchcase(backend.name, word)
