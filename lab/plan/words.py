"""A plan in sentences: what to run, what every other mix would lose, and what to change."""

from __future__ import annotations

from collections import Counter

from lab.plan.mixes import title
from lab.plan.result import Plan, PlanObjective
from lab.statistics import Interval

LEFT_OUT = (
    "Intervals say what other traffic like this would give in the simulator. They leave out its own error: on "
    "measurements that nothing was fitted to, its tokens per second are off by 7.4% in the median (41% at most), and "
    "the load at which speculation stops paying by a factor of 1.14 (docs/simulator.md)."
)


def verdict(plan: Plan, objective: PlanObjective) -> str:
    """Return whether all replicas alike are best, what the best mix of the other sort would lose, and the SLO kept.

    A difference is called one only if its interval excludes nought.
    """
    kept = plan.result(plan.chosen).value
    said = f" It keeps the SLO of {kept:.1%} of the requests." if objective.slo else ""
    return _against_the_other_sort(plan, objective) + said


def _against_the_other_sort(plan: Plan, objective: PlanObjective) -> str:
    name = title(plan.chosen, plan.kinds)
    is_alike = len(set(plan.chosen)) == 1
    rival = plan.mixed if is_alike else plan.alike
    if rival is None:
        return f"Run {name}. No mix of several methods was tried."
    other = title(rival, plan.kinds)
    what = "The best of several methods" if is_alike else "The best with all replicas alike"
    loss = plan.result(rival).loss
    start = f"Run {name}: " + ("all replicas alike is best." if is_alike else "a mixed pool is best.")
    if loss is None:
        return f"{start} {what}, {other}, cannot be compared: it does not serve all requests, or they are too few."
    if loss.low > 0:
        return f"{start} {what}, {other}, {_loses(loss, objective)}."
    if loss.high < 0:
        start = f"Run {name}: the search found it best. Yet on the windows that it has not seen {other} is better"
        return f"{start}, by {shown(loss)}: play more of the trace (--limit)."
    start = f"Run {name}: no mix of methods is shown to be better than all replicas alike."
    return f"{start} {what}, {other}, differs by {shown(loss)}, which may be chance."


def to_change(plan: Plan) -> str | None:
    """Return what to change of the replicas that run now; None if none is known."""
    if plan.present is None:
        return None
    now, planned = Counter(plan.present), Counter(plan.chosen)
    stopped, started = (tuple(each.elements()) for each in (now - planned, planned - now))
    if not stopped and not started:
        return "To change: nothing; this mix runs now."
    return f"To change: {' -> '.join(title(each, plan.kinds) or 'nothing' for each in (stopped, started))}."


def _loses(loss: Interval, objective: PlanObjective) -> str:
    interval = f"{loss.value:.1%} ({loss.low:.1%} to {loss.high:.1%})"
    return f"keeps the SLO of {interval} fewer requests" if objective.slo else f"takes {interval} longer"


def shown(loss: Interval | None) -> str:
    """Return a loss with its interval; `unknown` for None."""
    if loss is None:
        return "unknown"
    return f"{loss.value:+.1%} " + (f"({loss.low:+.1%} to {loss.high:+.1%})" if loss.is_known else "(no interval)")
