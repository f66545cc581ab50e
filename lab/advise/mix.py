"""Finding: another mix of methods, or of k and batch sizes, that serves a trace faster than the present replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from backends.calibration.calibration import load_calibration
from backends.speculation import serve_config
from gateway.advice.finding import Finding, Gain
from gateway.config.settings import ModelSettings
from gateway.service.default_temperature import assumed_temperature
from lab.plan.mixes import title
from lab.plan.planning import Options, Planned, plan_windows
from lab.plan.result import Objective
from lab.plan.traffic import sample
from lab.plan.words import verdict, why
from lab.trace import TraceRecord

OF = "mean time to finish"
_BUDGET, _REQUESTS = 60, 3000
_FEWEST = 2  # for one replica, other rules judge its method and k


def mix_findings(
    records: Iterable[TraceRecord], name: str, settings: ModelSettings, calibration: str, jobs: int | None = None
) -> Iterator[Finding]:
    """Yield the better mix for a trace, if one is shown to be better; `gateway plan` searches more widely."""
    if len(settings.backends) < _FEWEST:
        return
    known = load_calibration(calibration)
    present = [(one.method, serve_config(one.method, one.speculative_config)) for one in settings.backends.values()]
    limits = known.scheduler.max_model_len, assumed_temperature(settings)
    own = (record for record in records if record.backend in ("", *settings.backends))
    try:
        traffic = sample(own, len(present), *limits, limit=_REQUESTS)
        options = Options(budget=_BUDGET, seeds=1, jobs=jobs)
        planned = plan_windows(traffic.windows, known, len(present), present, settings.policy, options)
    except ValueError:  # too few requests, or nothing is known of this target
        return
    plan = planned.plan
    if plan is None or plan.present is None or plan.present == plan.chosen:
        return
    gain = plan.result(plan.present).gain
    if gain is None:
        return
    found = Gain(gain.value, gain.low, gain.high, OF)
    if found.is_worth_it:
        objective = Objective()
        reasons = " ".join([verdict(plan, objective), *why(plan, objective)])
        evidence = f"{traffic}, simulated with {calibration}. {reasons}"
        heading = f"{title(plan.chosen, plan.kinds)} instead of {title(plan.present, plan.kinds)}"
        yield Finding("mix", name, "all replicas", heading, found, evidence, _change(planned))


def _change(planned: Planned) -> str:
    """Return the kinds of replicas to run, as a pool file describes them."""
    lines = []
    for kind, count in Counter(kind.name for kind in planned.replicas).items():
        one = next(each for each in planned.replicas if each.name == kind)
        lines += [f"# {count}x", f"method: {one.method}"]
        lines += [f"speculative_config: {one.config}"] if one.config else []
    return "\n".join([*lines, "# as a whole pool file: gateway plan TRACE --config POOL --replicas N --out FILE"])
