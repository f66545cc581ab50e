"""The policies of a replay, each played in a process of its own where there is more than a little to play."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.config.settings import ModelSettings
from lab.options.policy import named_policies
from lab.parallel import all_cores, tell
from lab.replay.simulate import Replayed, ReplicaSpec, learned_rows, replay, set_learned
from lab.replay.table import RequestTable
from policies.policy import Policy
from policies.statistics import Row

ORACLE = "oracle"
_FEW = 100_000  # requests, all policies together, that are played before other processes have started
_TOLD_EVERY = 200  # requests


def chosen_policies(given: Sequence[str], served: ModelSettings, seed: int) -> dict[str, Policy | None]:
    """Return the policies of `--policy` in their order, each under a name of its own; None is the oracle one.

    Raises
    ------
    UsageError
        If one cannot be built.
    """
    named = [text for text in given if text != ORACLE]
    built = iter(named_policies(named, served, seed).items()) if named or not given else iter(())
    chosen: dict[str, Policy | None] = {}
    for text in given or ("",):
        if text == ORACLE:
            chosen[text] = None
        else:
            title, policy = next(built)
            chosen[title] = policy
    return chosen


@dataclass(frozen=True, slots=True)
class Game:
    """All that it takes to play a trace with one of the policies, by its name; sent once to each process.

    Parameters
    ----------
    given
        As on the command line: policies are built where they are played.
    learned
        By name, what a policy has learned before.
    """

    pool: tuple[ReplicaSpec, ...]
    requests: RequestTable
    given: tuple[str, ...]
    served: ModelSettings
    learned: Mapping[str, list[Row]]
    seed: int
    warmup: int

    def __call__(self, title: str) -> tuple[Replayed, list[Row]]:
        """Return what came of it, and what the policy has learned."""
        policy = None if title == ORACLE else chosen_policies(self.given, self.served, self.seed)[title]
        if policy is not None and title in self.learned:
            set_learned(policy, self.learned[title], self.requests[0].arrived_s)
        done = 0

        def told() -> None:
            nonlocal done
            done += 1
            if done % _TOLD_EVERY == 0:
                tell(_TOLD_EVERY)

        played = replay(self.pool, self.requests, policy, seed=self.seed, warmup=self.warmup, progress=told)
        return played, [] if policy is None else learned_rows(policy)


def play_all(game: Game, chosen: Mapping[str, Policy | None]) -> tuple[dict[str, Replayed], dict[str, list[Row]]]:
    """Play with each policy; return what came of each, and what those that learn have learned, by name."""
    titles = sorted(chosen, key=lambda title: _slowness(chosen[title]), reverse=True)  # the last to end begins first
    total = len(titles) * len(game.requests)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests, left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        jobs = 1 if total <= _FEW or len(titles) == 1 else None
        with all_cores(game, jobs, lambda count: bar.advance(task, count)) as run_all:
            answers = dict(zip(titles, run_all(titles), strict=True))
        bar.update(task, completed=total)
    learned = {title: rows for title, (_, rows) in answers.items() if rows}
    return {title: answers[title][0] for title in chosen}, learned


def _slowness(policy: Policy | None) -> int:
    return 1 if policy is None else 2 if policy.statistics is not None else 0
