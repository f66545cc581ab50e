"""A plan in sentences: what to run, what every other mix would lose, and which traffic decides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lab.plan.mixes import Mix, title
from lab.plan.result import Group, Objective, Plan, Reason, Turn
from lab.statistics import Interval

_MOST_KINDS = 3

LEFT_OUT = (
    "Intervals say what other traffic like this would give in the simulator. They leave out its own error: on "
    "measurements that nothing was fitted to, its tokens per second are off by 6.8% in the median (41% at most), and "
    "the load at which speculation stops paying by a factor of 1.14 (docs/calibration.md)."
)


def verdict(plan: Plan, objective: Objective) -> str:
    """Return whether all replicas alike are best, and what the best mix of the other sort would lose.

    A difference is called one only if its interval excludes nought.
    """
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


def why(plan: Plan, objective: Objective) -> list[str]:
    """Return which traffic decides the choice, and where it would change; empty without a reason."""
    reason = plan.reason
    loss = None if reason is None else plan.result(reason.rival).loss
    if reason is None or loss is None or not reason.groups:
        return []
    return [_deciding(plan, reason, loss, objective), _changing(plan, reason)]


def _deciding(plan: Plan, reason: Reason, loss: Interval, objective: Objective) -> str:
    first, *others = reason.groups
    name = title(reason.rival, plan.kinds)
    rates = _rates(plan, reason, first)
    if not others:
        return f"All traffic is {first.name}: {rates}."
    own = f"{first.name} ({first.tokens_share:.0%} of the output tokens)"
    of = "requests in the SLO" if objective.slo else "time"
    if loss.low <= 0 <= loss.high:
        last = reason.groups[-1]
        return (
            f"No traffic decides it: against {name} the plan is {_side(first, of)} and {_side(last, of)}, which about "
            f"cancels out."
        )
    rest = loss.value - first.lost
    sent = ""
    if len(first.served) > 1:
        kind, share = max(first.served.items(), key=lambda item: item[1])
        sent = f"; the plan sends {share:.0%} of it to {plan.kinds[kind].title}"
    return (
        f"{own} decides it: of the {loss.value:.1%} that {name} loses, {first.lost:.1%} is lost there and "
        f"{rest:.1%} on all other requests. On {first.name}, {rates}{sent}."
    )


def _side(group: Group, of: str) -> str:
    ahead = "ahead" if group.lost > 0 else "behind"
    return f"{abs(group.lost):.1%} of the {of} {ahead} on {group.name}"


def _rates(plan: Plan, reason: Reason, group: Group) -> str:
    """Return the tokens per step of the kinds that the plan and its rival are made of, the most frequent first."""
    members = [index for mix in (plan.chosen, reason.rival) for index in sorted(mix, key=lambda one: -mix.count(one))]
    known = [index for index in dict.fromkeys(members) if index in group.tokens_per_step][:_MOST_KINDS]
    texts = [f"{plan.kinds[index].title} emits {group.tokens_per_step[index]:.2f}" for index in known]
    return ", ".join(texts) + " tokens a step" if texts else "no kind alone serves all requests"


def _changing(plan: Plan, reason: Reason) -> str:
    name = title(reason.rival, plan.kinds)
    if reason.turns:
        turn = reason.turns[0]
        return f"{name} becomes the better one {_where(turn)} (now {turn.present:.0%})."
    if not reason.shifts:
        return "Nothing in the trace tells its requests apart, so no other share of them was tried."
    ahead = [shift for shift in reason.shifts if shift.loss.low > 0]
    if len(ahead) == len(reason.shifts):
        groups = " or ".join(dict.fromkeys(shift.group for shift in ahead if shift.share == 1.0))
        return f"It holds for other traffic too: the plan stays ahead of {name} if all requests are {groups}."
    names = " or ".join(_traffic(shift.group, shift.share) for shift in reason.shifts if shift.loss.low <= 0)
    return f"With {names} the two cannot be told apart; with no share tried is {name} shown to be better."


def _where(turn: Turn) -> str:
    low, high = sorted((turn.still, turn.then))
    side = "above" if turn.then > turn.present else "below"
    return f"{side} a share of {low:.0%} to {high:.0%} {turn.group}"


def _traffic(group: str, share: float) -> str:
    return f"{group} alone" if share == 1.0 else f"no {group}"


def _loses(loss: Interval, objective: Objective) -> str:
    interval = f"{loss.value:.1%} ({loss.low:.1%} to {loss.high:.1%})"
    return f"keeps the SLO of {interval} fewer requests" if objective.slo else f"takes {interval} longer"


def shown(loss: Interval | None) -> str:
    """Return a loss with its interval; `unknown` for None."""
    if loss is None:
        return "unknown"
    return f"{loss.value:+.1%} " + (f"({loss.low:+.1%} to {loss.high:+.1%})" if loss.is_known else "(no interval)")


def schedules(plan: Plan, kinds: Sequence[int] | Mix) -> list[str]:
    """Return the k by batch size of kinds that have it."""
    lines = []
    for index in dict.fromkeys(kinds):
        kind = plan.kinds[index]
        if kind.schedule:
            ranges = ", ".join(f"{k} for {first} to {last}" for first, last, k in kind.schedule)
            lines.append(f"{kind.title}: k by batch size is {ranges}")
    return lines
