"""Why a plan is better than its rival: which traffic decides it, and at which shares of it the choice would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.plan.judge import Played, loss_of
from lab.plan.mixes import Mix
from lab.plan.result import Group, Objective, Reason, Shift, Turn
from lab.plan.runner import RunAll, Task
from lab.plan.search import Split
from lab.plan.traffic import Windows, group_of
from lab.replay.simulate import Replayed
from lab.statistics import Interval

_FEWEST = 30
"""Requests that a group needs."""
_MOST_GROUPS = 4
_WINDOWS = 6
_HALVINGS = 3
_SEED = 1


@dataclass(frozen=True, slots=True)
class Rivals:
    """The chosen mix and its rival, and how to play them."""

    chosen: Mix
    rival: Mix
    split: Split
    run_all: RunAll
    objective: Objective

    def losses(self, shifts: Sequence[tuple[str, float]]) -> list[Interval | None]:
        """Return the rival's loss on traffic with other shares of groups; None if requests were not served."""
        counted = self.split.judged[:_WINDOWS]
        mixes = (self.chosen, self.rival)
        played = self.run_all([Task(mix, counted, self.split.learning, _SEED, one) for one in shifts for mix in mixes])
        return [
            loss_of(mine, theirs, 1, self.objective) for mine, theirs in zip(played[::2], played[1::2], strict=True)
        ]


def explain(rivals: Rivals, played: Played, seeds: int, windows: Windows) -> Reason:
    """Return why the chosen mix is better."""
    names = [np.array([group_of(request.features) for request in windows[each]]) for each in rivals.split.judged]
    groups = _groups(rivals, played, np.concatenate([window for window in names for _ in range(seeds)]), seeds)
    shares = {group.name: group.requests_share for group in groups}
    if len(shares) < 2:
        return Reason(rivals.rival, tuple(groups), (), ())
    tried = [*((name, 1.0) for name in shares), (groups[0].name, 0.0)]
    losses = zip(tried, rivals.losses(tried), strict=True)
    shifts = [Shift(name, share, loss) for (name, share), loss in losses if loss is not None]
    turns = [_turn(rivals, shares[shift.group], shift) for shift in shifts if shift.loss.high < 0]
    turns.sort(key=lambda turn: abs(turn.then - turn.present))
    return Reason(rivals.rival, tuple(groups), tuple(shifts), tuple(turns))


def _groups(rivals: Rivals, played: Played, names: npt.NDArray[np.str_], seeds: int) -> list[Group]:
    """Return the largest groups, the one on which the rival loses most first; none if requests were not served."""
    own, other = played[rivals.chosen], played[rivals.rival]
    if any(one.errors for one in (*own, *other)):
        return []
    mine, theirs = (np.concatenate([rivals.objective.values(one) for one in each]) for each in (own, other))
    more = mine - theirs if rivals.objective.slo else theirs - mine
    tokens = np.concatenate([one.output_tokens for one in own])
    sent_to = np.array(rivals.chosen)[np.concatenate([one.backend for one in own])]
    alike = {mix[0]: results for mix, results in played.items() if len(set(mix)) == 1}
    served = {kind: results for kind, results in alike.items() if not any(one.errors for one in results)}
    found, counts = np.unique(names, return_counts=True)
    groups = []
    for name in found[counts >= _FEWEST * seeds].tolist():
        inside = names == name
        groups.append(
            Group(
                name,
                float(inside.mean()),
                float(tokens[inside].sum() / tokens.sum()),
                float(more[inside].sum() / mine.sum()),
                {kind: float((sent_to[inside] == kind).mean()) for kind in dict.fromkeys(rivals.chosen)},
                {kind: _tokens_per_step(results, inside) for kind, results in served.items()},
            )
        )
    largest = sorted(groups, key=lambda group: -group.tokens_share)[:_MOST_GROUPS]
    return sorted(largest, key=lambda group: -group.lost)


def _tokens_per_step(played: Sequence[Replayed], inside: npt.NDArray[np.bool_]) -> float:
    """Return the output tokens after the first for each step after the prefill."""
    tokens, steps = (
        np.concatenate([getattr(one, column) for one in played])[inside] - 1 for column in ("output_tokens", "steps")
    )
    return float(tokens.sum() / max(1, steps.sum()))


def _turn(rivals: Rivals, present: float, edge: Shift) -> Turn:
    """Return between which shares of a group the rival becomes the better one, by halving."""
    still, then = present, edge.share
    for _ in range(_HALVINGS):
        middle = (still + then) / 2
        (loss,) = rivals.losses([(edge.group, middle)])
        if loss is not None and loss.value < 0:
            then = middle
        else:
            still = middle
    return Turn(edge.group, present, still, then)
