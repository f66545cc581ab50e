"""The replicas of a pool for simulation, with step times from calibrations, or fitted to the requests they served."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from backends.calibration.calibration import Calibration, Kind
from backends.calibration.files import known_calibrations
from backends.calibration.load import load_calibration
from backends.draft_schedule import draft_tokens
from backends.speculation import Method, serve_config
from backends.validation import UsageError
from gateway.config.settings import BackendSettings, ModelSettings
from gateway.service.replicas import limit_of
from lab.past.fit import fitted
from lab.past.served import ServedPart
from lab.simulation.outcomes import Outcomes
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.table import RequestTable
from policies.learned.prior import DEFAULT_CALIBRATION, expected_by_k

ENOUGH, FEWEST = 60, 16
"""Requests needed to fit a replica's own step times, and to fit any at all."""
_OFTEN = 0.05
_FITTED = "fitted to"
_DAMPED = 0.35  # of a correction: with steps 5% longer, more requests overlap, and take 8% to 16% longer

Means = Mapping[str, float | None]
"""Mean times in seconds, by `e2e_s`, `ttft_s` and `tpot_s`; None if no request has one."""


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """The replicas of a pool, and the source of each one's step times."""

    replicas: tuple[ReplicaSpec, ...]
    sources: Mapping[str, str]  # by the name of a calibration
    is_fitted: bool = False

    def corrected(self, means: Mapping[str, tuple[Means, Means]]) -> SimulatedPool:
        """Return the pool with fits closer to the recorded means, given recorded and replayed means by replica."""
        sources, moved = dict(self.sources), {}
        for path in {one.calibration for one in self.replicas if _FITTED in self.sources[one.calibration]}:
            own = [means[one.name] for one in self.replicas if one.calibration == path and one.name in means]
            if not own:
                continue
            steps = [[one["tpot_s"] or one["e2e_s"] or 0.0 for one in both] for both in own]
            firsts = [[one["ttft_s"] or 0.0 for one in both] for both in own]
            (recorded, replayed), (first_s, replayed_first_s) = np.mean([steps, firsts], axis=1).tolist()
            later_s = _DAMPED * (first_s - replayed_first_s)
            moved[path] = _moved(Path(path), (recorded / replayed) ** _DAMPED, later_s)
            sources[moved[path]] = sources[path]
        replicas = tuple(replace(one, calibration=moved.get(one.calibration, one.calibration)) for one in self.replicas)
        return replace(self, replicas=replicas, sources=sources)

    def __str__(self) -> str:
        """Return the sources of the step times, in words."""
        by_source: dict[str, list[str]] = {}
        for one in self.replicas:
            by_source.setdefault(self.sources[one.calibration], []).append(one.name)
        said = [f"{', '.join(names)}: {source}" for source, names in by_source.items()]
        return " ".join([f"Step times of {'; of '.join(said)}.", *self.premises()])

    def premises(self) -> list[str]:
        """Return the assumptions about unmeasured methods."""
        methods: dict[str, list[Method]] = {}
        for one in self.replicas:
            methods.setdefault(one.calibration, []).append(one.method)
        return [each for name, own in methods.items() for each in load_calibration(name).premises(own)]


def simulated_pool(
    served: ModelSettings, requests: RequestTable, named: str | None = None, *, machine: str | None = None
) -> SimulatedPool:
    """Return the replicas of a model, all with the calibration `named`, if given.

    Otherwise simulated replicas keep their own, and the step times of real ones are fitted to the requests they served:
    per replica, per kind if a replica has few, or over all. `machine` is the calibration of the machine that runs all
    real replicas: they then share one fit towards it or, if the trace has none of their requests, use it as it is.
    """
    name = load_calibration(named).name if named else None
    specs = [_spec(each, backend, name) for each, backend in served.backends.items()]
    sources = {name: Path(name).name if os.path.isabs(name) else name for name in (one.calibration for one in specs)}
    real = [one for one in specs if not one.calibration]
    if not real:
        return SimulatedPool(tuple(specs), sources)
    usual = getattr(served.policy.settings, "calibration", DEFAULT_CALIBRATION)
    towards = load_calibration(machine or usual)
    outcomes = requests.outcomes
    known = {one.name: own for one in real if len((own := _served(one, outcomes, towards)).sent_s)}
    if (count := sum(len(own.sent_s) for own in known.values())) < FEWEST:
        if machine:
            return simulated_pool(served, requests, machine)
        has = f"times of only {count} requests" if count else "no times"
        raise UsageError(
            f"--calibration: the trace has {has} of {', '.join(one.name for one in real)}, so how long their steps "
            "take is not known. Replay what this gateway has recorded of them (recorder: in the pool file), or name "
            f"the calibration of a like model and GPU: {known_calibrations()}"
        )
    fits: dict[tuple[str, ...], str] = {}
    for number, one in enumerate(specs):
        if one.calibration:
            continue
        alike = [
            each.name for each in real if each.name in known and (each.method, each.config) == (one.method, one.config)
        ]
        groups = ([one.name] if one.name in known else [], alike, list(known))
        enough = (each for each in groups if sum(len(known[name].sent_s) for name in each) >= ENOUGH)
        group = tuple(known if machine else next(enough, known))
        if group not in fits:
            path = requests.folder / f"fitted-{len(fits)}.yaml"
            fits[group] = str(path)
            sources[str(path)] = _fit({name: known[name] for name in group}, towards, path)
        specs[number] = replace(one, calibration=fits[group])
    return SimulatedPool(tuple(specs), sources, is_fitted=True)


def _spec(name: str, backend: BackendSettings, calibration: str | None) -> ReplicaSpec:
    """Return a replica; a real one has no calibration unless given."""
    config = serve_config(backend.method, backend.speculative_config)
    simulate = backend.simulate
    return ReplicaSpec(
        name=name,
        method=backend.method,
        config={key: value for key, value in config.items() if key != "method"},
        calibration=calibration or (simulate.calibration if simulate else ""),
        weight=backend.weight,
        max_model_len=simulate.max_model_len if simulate else None,
        drafter_limit=limit_of(backend),
    )


def _served(one: ReplicaSpec, outcomes: Outcomes, like: Calibration) -> ServedPart:
    """Return the requests that a replica served, with the drafts that their replay assumes."""
    index = outcomes.index_of(one.name, one.method)
    chosen = np.flatnonzero((outcomes.replica == index) & (outcomes.e2e_s > 0))
    chosen = chosen[np.argsort(outcomes.sent_at[chosen], kind="stable")]
    per_step, k, output = outcomes.tokens_per_step[chosen], draft_tokens(one.method, one.config), outcomes.output_tokens
    if not k:
        per_step = np.ones(len(chosen))
    elif np.isnan(per_step).any():
        usual = math.exp(expected_by_k(like.name, one.method, k, Kind.CHAT, like.temperature.default)[-1])
        per_step = np.where(np.isnan(per_step), usual if np.isnan(per_step).all() else np.nanmean(per_step), per_step)
    more = per_step - 1
    drafted = more if one.method is Method.SUFFIX else k * np.minimum(1.0, more) if one.method is Method.NGRAM else k
    return ServedPart(
        method=one.method,
        config=one.config,
        sent_s=outcomes.sent_at[chosen],
        prompt_tokens=outcomes.prompt_tokens[chosen],
        cached_tokens=outcomes.cached_tokens[chosen],
        output_tokens=output[chosen],
        steps=np.maximum(1.0, output[chosen] / np.clip(per_step, 1.0, k + 1)),
        ttft_s=outcomes.ttft_s[chosen],
        e2e_s=outcomes.e2e_s[chosen],
        drafted=float(np.mean(drafted)) if len(chosen) else 0.0,
        every=2,
    )


def _fit(served: Mapping[str, ServedPart], like: Calibration, path: Path) -> str:
    """Write a calibration fitted to the requests that some replicas served, by name, and describe it in words."""
    parts = list(served.values())
    count = sum(len(one.sent_s) for one in parts)
    what = f"{_FITTED} half of {count:,} recorded requests of {', '.join(served)}"
    document = fitted(parts, like, what)
    document["scheduler"]["max_num_seqs"] = max(_most_at_once(one, like.scheduler.max_num_seqs) for one in parts)
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return f"{what}, in the form of {Path(like.name).name}"


def _moved(path: Path, factor: float, later_s: float) -> str:
    """Write a calibration with steps `factor` times as long, and `later_s` more per request outside of them."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    for costs in (document["step"], *(each["drafting"] for each in document["methods"].values())):
        costs |= {name: factor * value for name, value in costs.items() if name.endswith("_s")}
    document["outside_s"] = max(0.0, document.get("outside_s", 0.0) + later_s)
    moved = path.with_name(f"{path.stem}+.yaml")
    moved.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return str(moved)


def _most_at_once(served: ServedPart, usual: int) -> int:
    """Return how many requests an engine runs at once: as many as while others waited, or the usual limit."""
    sent_s, first_s, ended_s = (np.sort(each) for each in served.times_s)
    running = np.searchsorted(first_s, sent_s, "right") - np.searchsorted(ended_s, sent_s, "right")
    at_first = np.arange(1, len(first_s) + 1) - np.searchsorted(ended_s, first_s, "right")
    most = int(at_first.max())
    is_limit = np.mean(running >= most) > _OFTEN and not np.isnan(served.ttft_s).any()
    return most if is_limit else max(most, usual)
