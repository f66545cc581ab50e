"""Runs the policies of a replay, in parallel processes if there are many requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.config.settings import ModelSettings
from lab.options.policy import named_reference, with_seed
from lab.parallel import Result, Task, all_cores
from lab.replay.comparison import Key, intervals, ratios, reference_of
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.simulate import Replayed, replay
from lab.simulation.table import RequestTable
from lab.statistics import Interval, replications_of
from policies.build import build
from policies.policy import Policy
from policies.roles import Heir

ORACLE = "oracle"
MIN_PARALLEL_REQUESTS = 100_000  # over all policies; simulating fewer takes less time than starting processes


def chosen_policies(given: Sequence[str], served: ModelSettings, seed: int) -> dict[str, Policy | None]:
    """Return the policies of `--policy` in order, each under a unique name; None stands for the oracle."""
    chosen: dict[str, Policy | None] = {}
    for text in given or (served.policy.name,):
        if text == ORACLE:
            chosen[text] = None
            continue
        name, reference = named_reference(text, served)
        number = 1 + sum(other == name or other.startswith(f"{name} (") for other in chosen)
        policy = build(reference.name, with_seed(reference.settings, seed))
        chosen[name if number == 1 else f"{name} ({number})"] = policy
    return chosen


@dataclass(frozen=True, slots=True)
class PolicyRunner:
    """Replays a trace with one of the policies, by name; sent once to each process."""

    pool: tuple[ReplicaSpec, ...]
    requests: RequestTable
    given: tuple[str, ...]  # policies as on the command line; the process that runs them builds them
    served: ModelSettings
    seed: int
    warmup: int

    def __call__(self, title: str) -> Replayed:
        """Return the result of a policy."""
        return replay(
            self.pool,
            self.requests,
            chosen_policies(self.given, self.served, self.seed)[title],
            seed=self.seed,
            warmup=self.warmup,
            remembers=True,
        )


def _replicated(runner: PolicyRunner, titles: Sequence[str], reference: str, number: int) -> dict[Key, float]:
    """Return the ratios to a reference on other traffic like the trace, with a number of at least 1."""
    requests = runner.requests.resampled(number)
    runner = replace(runner, requests=requests, seed=runner.seed + number)
    return ratios({title: runner(title) for title in titles}, reference, requests.traits)


def play_all(runner: PolicyRunner, chosen: Mapping[str, Policy | None]) -> dict[str, Replayed]:
    """Replay with each policy."""
    # Slowest first, so that all processes end at about the same time.
    titles = sorted(chosen, key=lambda title: _slowness(chosen[title]), reverse=True)
    played = dict(zip(titles, _run(runner, titles, len(titles) * len(runner.requests)), strict=True))
    return {title: played[title] for title in chosen}


def compare(runner: PolicyRunner, played: Mapping[str, Replayed], replications: int | None) -> dict[Key, Interval]:
    """Return the ratios of policies to a reference, with intervals from replays of other traffic."""
    served = {title: one for title, one in played.items() if len(one.e2e_s)}
    if len(served) < 2:
        return {}
    reference = reference_of(list(served))
    others = partial(_replicated, runner, tuple(served), reference)
    each = len(served) * len(runner.requests)
    count = replications_of(replications, each)
    draws = count > 1 and not runner.requests.is_one
    found = _run(others, range(1, count + 1), count * each) if draws else []
    return intervals(ratios(served, reference, runner.requests.traits), found)


def _run(work: Callable[[Task], Result], tasks: Sequence[Task], requests: int) -> list[Result]:
    """Run tasks that play `requests` requests in total."""
    jobs = 1 if requests <= MIN_PARALLEL_REQUESTS or len(tasks) == 1 else None
    with all_cores(work, jobs, "replaying") as run_all:
        return run_all(tasks)


def _slowness(policy: Policy | None) -> int:
    return 1 if policy is None else 2 if isinstance(policy, Heir) else 0
