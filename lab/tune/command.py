"""Implementation of `gateway tune`: a search on the first part of a trace, validated on the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import yaml

from backends.validation import UsageError
from lab.options.policy import with_seed
from lab.options.shared import slo_bounds
from lab.parallel import all_cores
from lab.past.check import past_of
from lab.past.pool import simulated_pool
from lab.replay.command import requests_of, served_model
from lab.replay.figures import figures_of, figures_tables
from lab.replay.play import MIN_PARALLEL_REQUESTS
from lab.report.terminal import report, write_file, write_json
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import Replayed, replay, slo_kept
from lab.simulation.table import RequestTable
from lab.statistics import of_replications, replications_of
from lab.tune.options import Goal, TuneOptions
from lab.tune.search import rules_document, search
from policies.build import build
from policies.load_policy import LoadSettings
from policies.policy import PolicySettings
from policies.rules.policy import ThresholdSettings

_MOST_REQUESTS = 60_000  # per trial, even if its part is longer
_STRETCHES = 10  # of consecutive requests, spread evenly over a longer part
_WHAT = {
    Goal.MEAN: "mean time to finish, s",
    Goal.P99: "p99 of the time to finish, s",
    Goal.GOODPUT: "share of requests that miss the SLO",
}


class _Task(NamedTuple):
    policy: str
    settings: PolicySettings
    held_out: int | None = None  # None: the tuning part; 0: the rest; 1 and more: other traffic like the rest


def _play(
    pool: Sequence[ReplicaSpec], tuning: Sequence[Sequence[ReplayRequest]], rest: RequestTable, seed: int, task: _Task
) -> list[Replayed]:
    number, parts = task.held_out or 0, tuning
    if task.held_out is not None:
        parts = [rest.resampled(number) if number else rest]
    settings = with_seed(task.settings, seed)
    return [replay(pool, part, build(task.policy, settings), seed=seed + number) for part in parts]


def run_tune(options: TuneOptions) -> int:
    """Tune, given the command line's options."""
    goal, slo = options.objective, slo_bounds(options.slo)
    if goal is Goal.GOODPUT and not slo:
        raise UsageError("--objective goodput needs bounds: --slo ttft=0.5,tpot=0.02,e2e=10, in seconds")
    try:
        model, served = served_model(options.config, options.model)
        given = served.policy.settings
        present = given if isinstance(given, ThresholdSettings) else ThresholdSettings()
        name = "present" if present is given else "default"
        names = list(served.backends)
        with requests_of(options, served, options.seed, options.rate, options.speed) as requests:
            past = past_of(simulated_pool(served, requests, options.calibration), requests, options.seed)
            assumed = requests.assumed
            cut = round(options.part * len(requests))
            if not 0 < cut < len(requests):
                given_part = f"--part {options.part:g} leaves none for tuning or for validation"
                raise UsageError(f"the trace has {len(requests)} requests; {given_part}")
            play = partial(_play, past.pool.replicas, stretches(requests[:cut]), requests[cut:], options.seed)
            few = options.trials * cut <= MIN_PARALLEL_REQUESTS
            with all_cores(play, 1 if few else None, "simulating") as play_all:
                unserved = sum(one.errors for parts in play_all([_Task("thresholds", present)]) for one in parts)

                def score_all(tried: Sequence[ThresholdSettings]) -> list[float]:
                    played = play_all([_Task("thresholds", one) for one in tried])
                    return [score(goal, slo, parts, unserved) for parts in played]

                tuned = search(score_all, present, options.trials, options.seed)
                compared = {
                    "tuned": _Task("thresholds", tuned, 0),
                    name: _Task("thresholds", present, 0),
                    "least_loaded": _Task("least_loaded", LoadSettings(), 0),
                }
                played = dict(zip(compared, play_all(list(compared.values())), strict=True))
                rest = requests[cut:]
                count = 0 if rest.is_one else replications_of(options.replications, 2 * len(rest))
                again = [_Task("thresholds", one, 1 + n) for n in range(count) for one in (tuned, present)]
                others = [score(goal, slo, one) for one in play_all(again)]
        scores = {name: score(goal, slo, one) for name, one in played.items()}
        better = scores["tuned"] < scores[name]
        found = _found(goal, scores, list(zip(others[::2], others[1::2], strict=True)))
        found[0] = past.beside(found[0])
        if name != "present":
            found.append(f"The pool's policy, {served.policy.name}, is not compared: `gateway replay --policy` does.")
        left = len(requests) - cut
        searched = f"{options.trials:,} trials on the first {cut:,} requests, validated on the other {left:,}."
        rules = _rules_file(tuned if better else present, [searched, *found, *assumed, str(past.pool)])
        write_file(options.out, rules.encode())
        figures = {name: {"score": scores[name], **figures_of(one, names, slo)} for name, [one] in played.items()}
        document = {"model": model, "objective": goal, "kept_present": not better, "held_out": figures}
        write_json(options.json_file, document | {"assumed": assumed, "past": past.document()})
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    tables = figures_tables(figures, slo, "rules")
    report("gateway tune", [*found, "", searched, *assumed, "Held-out requests", *tables], before=past.parts())
    return 0


def stretches(requests: RequestTable) -> list[list[ReplayRequest]]:
    """Return the requests that each trial plays, as objects, which cache their scripts."""
    count = 1 if len(requests) <= _MOST_REQUESTS else _STRETCHES
    each = min(len(requests), _MOST_REQUESTS) // count
    starts = np.linspace(0, len(requests) - each, count).astype(int).tolist()
    return [list(requests[start : start + each]) for start in starts]


def score(goal: Goal, slo: Mapping[str, float], played: Sequence[Replayed], unserved: float = math.inf) -> float:
    """Return what the search minimizes; infinite if more than `unserved` requests were not served."""
    e2e_s, errors = np.concatenate([one.e2e_s for one in played]), sum(one.errors for one in played)
    if not len(e2e_s) or errors > unserved:
        return math.inf
    if goal is Goal.GOODPUT:
        return 1.0 - sum(int(slo_kept(one, slo).sum()) for one in played) / (len(e2e_s) + errors)
    return float(e2e_s.mean() if goal is Goal.MEAN else np.percentile(e2e_s, 99))


def _found(goal: Goal, scores: Mapping[str, float], replayed: Sequence[tuple[float, float]]) -> list[str]:
    """Return lines that describe the result, for the terminal and the file."""
    (_, tuned), (name, present), (_, load) = scores.items()
    lines = [f"Held out, {_WHAT[goal]}: tuned {tuned:.4g}, {name} {present:.4g}, least_loaded {load:.4g}."]
    if tuned >= present:
        return [*lines, f"No gain: these are the {name} rules, unchanged."]
    if len(replayed) < 2:
        lines.append(f"That is {tuned / present - 1:+.1%}; --replications 6 says whether it may be chance.")
    elif min(tuned, *(score for pair in replayed for score in pair)) > 0:
        change = of_replications(tuned / present, [mine / theirs for mine, theirs in replayed]).less_one()
        chance = " It may be chance." if change.high >= 0 else ""
        lines.append(f"That is {change.value:+.1%} (95% interval {change.low:+.1%} to {change.high:+.1%}).{chance}")
    else:
        lines.append("Too few requests to say whether the gain is chance.")
    if load < tuned:
        lines.append("The policy least_loaded does better than these rules.")
    return lines


def _rules_file(settings: ThresholdSettings, comments: list[str]) -> str:
    """Return a file for `--policy`, whose `policy:` can be copied to a pool file."""
    others = settings.model_dump(mode="json", exclude={"rules", "spill"}, exclude_defaults=True)
    policy = {"name": "thresholds", **others, **rules_document(settings)}
    head = "".join(f"# {line}\n" for line in ("Made by `gateway tune` on simulated replicas.", *comments))
    return head + yaml.safe_dump({"policy": policy}, sort_keys=False, default_flow_style=None, width=10_000)
