"""Implementation of `gateway autopilot`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime

import orjson

from backends.validation import UsageError
from gateway.config.load import load_pool
from gateway.service.default_temperature import assumed_temperature
from lab.autopilot.capacity import requests_per_second
from lab.autopilot.change import Changer, Floor, PostponedError
from lab.autopilot.control import Compared, compare
from lab.autopilot.gateway_admin import ChangeError, GatewayAdmin
from lab.autopilot.journal import Change, Journal, Outcome, Step, only_one
from lab.autopilot.options import AutopilotOptions, calibration_of, fleet_of, restarts_of
from lab.autopilot.proposal import Proposal, Rule, methods_for, propose
from lab.autopilot.traffic import Recorded
from lab.replay.command import served_model
from lab.replay.request import ReplayRequest

DONE, FAILED = 0, 1
LEAST_REQUESTS = 500
BEFORE_S = 86400.0
"""How far back requests are compared with, and for how long an undone change is not made again."""
_RATE_S = 300.0


def run_autopilot(options: AutopilotOptions, say: Callable[[str], None]) -> int:
    """Run once, or every so often until a change fails.

    Returns
    -------
    int
        Exit status: 0 for done, nothing to do, or a change that has to wait; 1 if a change failed, and nothing more is
        changed.

    Raises
    ------
    UsageError
        If the input is wrong; nothing has changed.
    """
    path = options.state or options.config.with_name(f"{options.config.name}.autopilot.json")
    with only_one(path) if options.apply else contextlib.nullcontext():
        while True:
            status = Autopilot(options, say, Journal.read(path)).look()
            if options.every_s is None or status != DONE:
                return status
            time.sleep(options.every_s)


class Autopilot:
    """One look at the traffic, and what follows from it.

    Parameters
    ----------
    say
        Told what is found and done, a line each.
    """

    def __init__(self, options: AutopilotOptions, say: Callable[[str], None], journal: Journal) -> None:
        self._options = options
        self._journal = journal
        self._model, self._served = served_model(options.config, options.model)
        self._fleet = fleet_of(self._served)
        recorder = load_pool(options.config).recorder
        sample = 1.0 if recorder is None else recorder.sample
        if not options.records.is_dir():
            raise UsageError(f"{options.records} is no folder; name the recorder's: `recorder: {{path: ...}}`")
        self._recorded = Recorded(options.records, self._model, sample, assumed_temperature(self._served))
        self._calibration = calibration_of(self._served, options.calibration)
        self._report: dict[str, object] = {"model": self._model, "at": datetime.now(UTC).isoformat()}
        self._tell = say

    def look(self) -> int:
        """Judge the last change, or plan; change what follows if that is wanted."""
        now_s = time.time()
        try:
            return self._judge_or_plan(now_s)
        except PostponedError as error:
            self._say("postponed", str(error))
            return DONE
        except ChangeError as error:
            self._say("failed", f"nothing more is changed: {error}")
            return FAILED
        finally:
            if self._options.json_file is not None:
                self._options.json_file.write_bytes(orjson.dumps(self._report, option=orjson.OPT_INDENT_2))

    def _judge_or_plan(self, now_s: float) -> int:
        last = self._journal.last(self._model)
        if last is None or last.outcome not in ("under way", "on trial"):
            return self._plan(now_s)
        if any(self._fleet.get(step.backend) != (step.after if step.done else step.before) for step in last.steps):
            self._say("decision", "the replicas are not as the last change left them: it is no longer followed")
            if self._options.apply:
                last.outcome, last.note, last.ended_s = "kept", "changed by someone else", now_s
                self._journal.write()
            return DONE
        return self._go_on(last) if last.outcome == "under way" else self._judge(last, now_s)

    def _plan(self, now_s: float) -> int:
        options = self._options
        requests = self._requests(now_s - options.window_s, now_s)
        self._say("traffic", f"{len(requests):,} requests of the last {_span(options.window_s)}")
        if len(requests) < LEAST_REQUESTS:
            self._say("decision", f"no change: at least {LEAST_REQUESTS:,} requests are needed")
            return DONE
        try:
            methods = methods_for(list(self._fleet.values()), options.methods)
            proposal = propose(
                requests, self._calibration, self._fleet, self._served.policy, methods,
                budget=options.budget, jobs=options.jobs,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(str(error)) from error
        self._show(proposal)
        rule = Rule(options.margin, options.restart_s, options.window_s)
        objection = rule.objection(proposal) or self._journal.refuses(self._model, proposal.changes, now_s, BEFORE_S)
        if objection is not None:
            self._say("decision", f"no change: {objection}")
            return DONE
        if not options.apply:
            self._say("decision", "worth it; a dry run changes nothing, --apply does")
            return DONE
        assert proposal.gain is not None
        gain = proposal.gain
        steps = [Step(backend=name, before=self._fleet[name], after=one) for name, one in proposal.changes.items()]
        change = Change(model=self._model, began_s=now_s, steps=steps, gain=gain.value, low=gain.low, high=gain.high)
        return self._make(change, requests)

    def _make(self, change: Change, requests: list[ReplayRequest], outcome: Outcome = "on trial") -> int:
        """Make a change, and note in the journal how far it has come."""
        changer = self._changer(requests)

        async def make() -> None:
            await changer.check(change)
            if change not in self._journal.changes:
                self._journal.changes.append(change)
            self._journal.write()
            await changer.make(change, self._fleet)

        try:
            asyncio.run(make())
        except ChangeError as error:
            if change in self._journal.changes:
                change.outcome, change.note, change.ended_s = "failed", str(error), time.time()
                self._journal.write()
            raise
        change.outcome = outcome
        self._journal.write()
        self._say("done", f"{len(change.steps)} replicas changed; {outcome}")
        return DONE

    def _go_on(self, change: Change) -> int:
        """Go on with a change that was postponed or cut off."""
        left = ", ".join(step.backend for step in change.steps if not step.done)
        self._say("decision", f"a change is under way; {left} are left")
        if not self._options.apply:
            return DONE
        now_s = time.time()
        outcome: Outcome = "kept" if change.undoes else "on trial"
        return self._make(change, self._requests(now_s - self._options.window_s, now_s), outcome)

    def _judge(self, change: Change, now_s: float) -> int:
        """Compare the time since a change with that before it; undo the change if it is a loss."""
        compared = self.compared(change, now_s)
        self._say("control", f"since the last change: {compared}")
        if compared.is_loss(self._options.tolerance):
            return self._undo(change, compared)
        if now_s - change.ended_s < self._options.window_s:
            self._say("decision", f"no change: the last one is on trial for {_span(self._options.window_s)}")
            return DONE
        self._say("decision", "the last change is kept")
        if self._options.apply:
            change.outcome, change.note = "kept", str(compared)
            self._journal.write()
        return DONE

    def compared(self, change: Change, now_s: float) -> Compared:
        """Compare the time since a change with the time since the one before it, at most a day."""
        index = self._journal.changes.index(change)
        earlier = [one.ended_s for one in self._journal.changes[:index] if one.model == self._model]
        start_s = max([change.began_s - BEFORE_S, *earlier])
        return compare(self._recorded.seen(start_s, change.began_s), self._recorded.seen(change.ended_s, now_s))

    def _requests(self, start_s: float, end_s: float) -> list[ReplayRequest]:
        return self._recorded.requests(start_s, end_s, self._calibration.scheduler.max_model_len)

    def _undo(self, change: Change, compared: Compared) -> int:
        self._say("decision", f"the last change is undone: {compared}")
        if not self._options.apply:
            return DONE
        back = [Step(backend=one.backend, before=one.after, after=one.before) for one in change.steps]
        now_s = time.time()
        undoing = Change(model=self._model, began_s=now_s, steps=back, gain=0.0, low=0.0, high=0.0, undoes=True)
        change.outcome, change.note = "undone", str(compared)
        return self._make(undoing, self._requests(change.ended_s, now_s), "kept")

    def _changer(self, requests: list[ReplayRequest]) -> Changer:
        options = self._options
        admin = GatewayAdmin(
            options.gateway.rstrip("/"), (options.admin or options.gateway).rstrip("/"), self._model,
            options.admin_key, options.key,
        )  # fmt: skip
        floor = Floor(
            options.floor,
            options.load,
            lambda fleet: requests_per_second(self._calibration.name, fleet, requests),
            lambda: self._recorded.rate(time.time(), _RATE_S),
        )
        restarts = restarts_of(self._served, admin, options.config, options.deployments or {})
        return Changer(
            admin, floor, restarts, self._journal, self._tell, self._served.rescue, patience_s=options.patience_s
        )

    def _show(self, proposal: Proposal) -> None:
        for name, runs in self._fleet.items():
            new = proposal.changes.get(name)
            self._tell(f"  {name}: {runs}" + (f"  ->  {new}" if new else "  (stays)"))
        gain = proposal.gain
        if gain is not None and proposal.changes:
            self._say("gain", f"{gain.value:.1%} of the mean time to finish (95%: {gain.low:+.1%} to {gain.high:+.1%})")
        self._report["changes"] = {
            name: {"before": self._fleet[name].model_dump(mode="json"), "after": one.model_dump(mode="json")}
            for name, one in proposal.changes.items()
        }

    def _say(self, what: str, text: str) -> None:
        self._report[what] = text
        self._tell(f"{what}: {text}")


def _span(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"
