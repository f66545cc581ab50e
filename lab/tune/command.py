"""`gateway tune` from its options to its exit status."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from backends.validation import UsageError
from gateway.config.settings import ModelSettings
from lab.options.policy import policy_reference
from lab.options.slo import slo_bounds
from lab.parallel import all_cores
from lab.replay.command import ReplayOptions, pool_of, requests_of, served_model
from lab.replay.figures import figures_of
from lab.replay.simulate import Replayed
from lab.tune.knobs import Goal, Scoring, mean_ratio
from lab.tune.search import BUDGET, Found, Ground, Search, Task, Window
from policies.rules.policy import ThresholdSettings

_FEW = 100_000  # requests that are played before other processes have started
_WHAT = {
    Goal.MEAN: "mean time to finish, s",
    Goal.P99: "p99 of the time to finish, s",
    Goal.GOODPUT: "share of requests that break the SLO",
}


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What was asked for on the command line; see `gateway tune --help`."""

    replay: ReplayOptions
    out: Path
    policy: str | None = None
    objective: str = Goal.MEAN.value
    trials: int = 100
    part: float = 0.6
    budget: int = BUDGET


def run_tune(options: TuneOptions) -> int:
    """Tune as the command line asks for it.

    Returns
    -------
    int
        Exit status: 0, or 2 if the input is wrong.
    """
    given = options.replay
    try:
        goal, slo = _goal(options), slo_bounds(given.slo)
        model, served = served_model(given.config, given.model)
        present = _present(options.policy, served)
        pool, scoring = pool_of(served, given.calibration), Scoring(goal, slo)
        with requests_of(given, served) as requests:
            cut = _cut(len(requests), options.part)
            rest = Window(cut, len(requests))
            jobs = 1 if options.trials * cut <= _FEW else None
            with all_cores(Ground(pool, requests, given.seed), jobs) as play_all:
                found = _search(Search(play_all, scoring, cut, options.trials, given.seed, options.budget), present)
                by_load = policy_reference("least_loaded", served).settings
                judges = {
                    "tuned": Task("thresholds", found.settings, rest),
                    "present": Task("thresholds", present, rest),
                    "least_loaded": Task("least_loaded", by_load, rest),
                }
                played = dict(zip(judges, play_all(list(judges.values())), strict=True))
        scores = {name: scoring([one]) for name, one in played.items()}
        better = scores["tuned"] < scores["present"]
        told = [*_played(found, rest), *_told(goal, scores, played, given.seed)]
        options.out.write_text(_rules_file(found.settings if better else present, told), encoding="utf-8")
        backends = [one.name for one in pool]
        figures = {
            name: {"score": scores[name], **figures_of(one, backends, slo, None)} for name, one in played.items()
        }
        if given.json_file is not None:
            document = {
                "model": model,
                "objective": goal.value,
                "kept_present": not better,
                "trials": {"asked": found.asked, "on_each_rung": found.trials},
                "windows": list(map(list, found.schedule.windows)),
                "verified_requests": found.verified,
                "held_out": figures,
            }
            given.json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    _print(figures, goal, told)
    return 0


def _goal(options: TuneOptions) -> Goal:
    if options.objective not in set(Goal):
        raise UsageError(f"--objective {options.objective}: there are {', '.join(Goal)}")
    goal = Goal(options.objective)
    if goal is Goal.GOODPUT and options.replay.slo is None:
        raise UsageError("--objective goodput needs bounds: --slo ttft=0.5,tpot=0.02,e2e=10, in seconds")
    return goal


def _present(given: str | None, served: ModelSettings) -> ThresholdSettings:
    """Return the rules to begin with: those named, else the pool's, else the default ones."""
    settings = policy_reference(given, served).settings
    if isinstance(settings, ThresholdSettings):
        return settings
    if given is not None:
        raise UsageError(f"--policy {given}: only rules can be tuned, those of `thresholds`")
    return ThresholdSettings()


def _cut(requests: int, part: float) -> int:
    """Return how many of the requests are tuned on: the first."""
    cut = round(part * requests)
    if not 0 < cut < requests:
        raise UsageError(f"the trace has {requests} requests; --part {part:g} leaves none to tune on or to judge by")
    return cut


def _search(search: Search, present: ThresholdSettings) -> Found:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("trials, left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=search.trials)
        return search.run(present, lambda best: bar.update(task, advance=1, description=f"best {best:.4g}"))


def _played(found: Found, rest: Window) -> list[str]:
    """Return on what it was tuned and judged, in lines for a person and for the file."""
    schedule = found.schedule
    judges = f"judged on the other {rest.stop - rest.start:,}."
    useless = found.asked - found.trials[0]
    left_out = [f"{useless:,} of them could never hold, or left more requests unserved."] if useless else []
    if len(schedule.windows) == 1:
        return [f"{found.asked:,} trials on the first {schedule.requests:,} requests, {judges}", *left_out]
    each = schedule.windows[0].stop - schedule.windows[0].start
    counts = np.cumsum([len(places) for places in schedule.rungs]).tolist()
    rungs = ", ".join(f"{trials:,} on {count}" for count, trials in zip(counts, found.trials, strict=True))
    verified = "all of these" if found.verified == schedule.requests else f"{found.verified:,} of these"
    return [
        f"{found.asked:,} trials on windows of {each:,} requests over the first {schedule.requests:,}: {rungs}.",
        *left_out,
        f"The best and the present rules then played {verified}, and were {judges}",
    ]


def _told(goal: Goal, scores: Mapping[str, float], played: Mapping[str, Replayed], seed: int) -> list[str]:
    """Return what came of it, in lines for a person and for the file."""
    tuned, present, load = (scores[name] for name in ("tuned", "present", "least_loaded"))
    lines = [f"There, {_WHAT[goal]}: tuned {tuned:.4g}, present {present:.4g}, least_loaded {load:.4g}."]
    if tuned >= present:
        return [*lines, "No gain: these are the present rules, unchanged."]
    if goal is Goal.MEAN:
        ratio = mean_ratio(played["tuned"], played["present"], seed)
        if ratio is None:
            lines.append("Too few requests to say whether the gain is chance.")
        else:
            chance = " It may be chance." if ratio.high >= 1 else ""
            lines.append(
                f"That is {100 * (ratio.value - 1):+.1f}% (95% interval {100 * (ratio.low - 1):+.1f}% to "
                f"{100 * (ratio.high - 1):+.1f}%).{chance}"
            )
    if load < tuned:
        lines.append("The policy least_loaded does better than these rules.")
    return lines


def _rules_file(settings: ThresholdSettings, told: list[str]) -> str:
    """Return the file, which `--policy` reads, and whose `policy:` may stand in a pool file."""
    lines = ["# Made by `gateway tune` on simulated replicas.", *(f"# {line}" for line in told), "policy:"]
    lines.append("  name: thresholds")
    others = settings.model_dump(mode="json", exclude={"rules", "spill"}, exclude_defaults=True)
    lines += [f"  {name}: {_inline(value)}" for name, value in others.items()]
    lines.append(f"  spill: {_inline(settings.spill.model_dump())}")
    lines.append("  rules:")
    lines += [f"    {line}" for rule in settings.rules for line in rule.lines()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()


def _print(figures: Mapping[str, Mapping[str, Any]], goal: Goal, told: list[str]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(title="Held-out requests, times in seconds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rules")
    for heading in ("errors", "e2e mean", "p50", "p99", "ttft mean", "goodput/s"):
        table.add_column(heading, justify="right")
    for name, one in figures.items():
        times = (one["e2e_s"]["mean"], one["e2e_s"]["p50"], one["e2e_s"]["p99"], one["ttft_s"]["mean"])
        shown = ("-" if value is None else f"{value:.3f}" for value in times)
        table.add_row(name, f"{one['errors']}", *shown, f"{one['goodput']:.2f}")
    console.print(table)
    for line in told:
        console.print(line)
