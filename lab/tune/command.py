"""Implementation of `gateway tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import yaml

from backends.validation import UsageError
from gateway.config.settings import ModelSettings
from lab.options.policy import policy_reference
from lab.options.shared import slo_bounds
from lab.parallel import all_cores
from lab.replay.command import pool_of, requests_of, served_model
from lab.replay.figures import figures_of, figures_tables
from lab.report.terminal import report
from lab.statistics import REPLICATIONS, of_replications
from lab.tune.knobs import Goal, Scoring
from lab.tune.options import TuneOptions
from lab.tune.search import RUNGS, Search, SearchResult, Task, Window, WindowRunner, windows_of
from policies.rules.policy import ThresholdSettings

_MIN_PARALLEL_REQUESTS = 100_000  # fewer are simulated before other processes would have started
_WHAT = {
    Goal.MEAN: "mean time to finish, s",
    Goal.P99: "p99 of the time to finish, s",
    Goal.GOODPUT: "share of requests that miss the SLO",
}


def run_tune(options: TuneOptions) -> int:
    """Tune with the options of the command line."""
    try:
        goal, slo = _goal(options), slo_bounds(options.slo)
        model, served = served_model(options.config, options.model)
        present = _present(options.policy, served)
        pool, scoring = pool_of(served, options.calibration), Scoring(goal, slo)
        with requests_of(options, served, options.seed) as requests:
            cut = _cut(len(requests), options.part)
            rest = Window(cut, len(requests))
            windows = windows_of(cut, options.trials, options.budget)
            jobs = 1 if options.trials * cut <= _MIN_PARALLEL_REQUESTS else None
            with all_cores(WindowRunner(pool, requests, options.seed), jobs, "simulating") as play_all:
                search = Search(play_all, scoring, windows, present, options.budget)
                result = search.run(options.trials, options.seed)
                by_load = policy_reference("least_loaded", served).settings
                compared = {
                    "tuned": Task("thresholds", result.settings, rest),
                    "present": Task("thresholds", present, rest),
                    "least_loaded": Task("least_loaded", by_load, rest),
                }
                played = dict(zip(compared, play_all(list(compared.values())), strict=True))
                others = [
                    compared[name]._replace(window=rest._replace(replication=number))
                    for number in range(1, REPLICATIONS + 1)
                    for name in ("tuned", "present")
                ]
                replayed = [scoring([one]) for one in play_all(others)]
        scores = {name: scoring([one]) for name, one in played.items()}
        better = scores["tuned"] < scores["present"]
        pairs = list(zip(replayed[::2], replayed[1::2], strict=True))
        found, searched = _result_lines(goal, scores, pairs), _search_lines(result, windows, cut, len(requests))
        options.out.write_text(
            _rules_file(result.settings if better else present, [*searched, *found]), encoding="utf-8"
        )
        backends = [one.name for one in pool]
        figures = {name: {"score": scores[name], **figures_of(one, backends, slo)} for name, one in played.items()}
        if options.json_file is not None:
            document = {
                "model": model,
                "objective": goal.value,
                "kept_present": not better,
                "trials": {"asked": result.asked, "on_each_rung": result.trials},
                "windows": list(map(list, windows)),
                "held_out": figures,
            }
            options.json_file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    report(
        "gateway tune",
        [*found, "", *searched, "Held-out requests", *figures_tables(figures, slo, "rules")],
        options.report,
    )
    return 0


def _goal(options: TuneOptions) -> Goal:
    if options.objective not in set(Goal):
        raise UsageError(f"--objective {options.objective}: unknown; the objectives are {', '.join(Goal)}")
    goal = Goal(options.objective)
    if goal is Goal.GOODPUT and options.slo is None:
        raise UsageError("--objective goodput needs bounds: --slo ttft=0.5,tpot=0.02,e2e=10, in seconds")
    return goal


def _present(given: str | None, served: ModelSettings) -> ThresholdSettings:
    """Return the rules to start from: those given, else the pool's, else the default rules."""
    settings = policy_reference(given, served).settings
    if isinstance(settings, ThresholdSettings):
        return settings
    if given is not None:
        raise UsageError(f"--policy {given}: only rules can be tuned, those of `thresholds`")
    return ThresholdSettings()


def _cut(requests: int, part: float) -> int:
    """Return the number of requests in the tuning part."""
    cut = round(part * requests)
    if not 0 < cut < requests:
        raise UsageError(f"the trace has {requests} requests; --part {part:g} leaves none for tuning or for validation")
    return cut


def _search_lines(result: SearchResult, windows: Sequence[Window], cut: int, requests: int) -> list[str]:
    """Return lines that describe the search, for the terminal and the file."""
    rejected = result.asked - result.trials[0]
    rejections = [f"{rejected:,} of them could never hold, or left more requests unserved."] if rejected else []
    searched = f"the first {cut:,} requests, validated on the other {requests - cut:,}."
    if len(windows) == 1:
        return [f"{result.asked:,} trials on {searched}", *rejections]
    each = windows[0].stop - windows[0].start
    rungs = ", ".join(f"{trials:,} on {count}" for count, trials in zip(RUNGS, result.trials, strict=True))
    return [f"{result.asked:,} trials on windows of {each:,} requests ({rungs}) of {searched}", *rejections]


def _result_lines(goal: Goal, scores: Mapping[str, float], replayed: Sequence[tuple[float, float]]) -> list[str]:
    """Return lines that describe the result, for the terminal and the file."""
    tuned, present, load = (scores[name] for name in ("tuned", "present", "least_loaded"))
    lines = [f"Held out, {_WHAT[goal]}: tuned {tuned:.4g}, present {present:.4g}, least_loaded {load:.4g}."]
    if tuned >= present:
        return [*lines, "No gain: these are the present rules, unchanged."]
    if min(tuned, *(score for pair in replayed for score in pair)) > 0:
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
    lines = ["# Made by `gateway tune` on simulated replicas.", *(f"# {comment}" for comment in comments), "policy:"]
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
