"""The room for comparisons: at most one at a time for each model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Response
from pydantic import ValidationError

from backends import background
from gateway.admin.documents import put_next
from gateway.admin.policy import ModelReference
from gateway.config.settings import PoolSettings
from gateway.dialects.errors import GatewayError
from gateway.gateway import Room, join
from gateway.relay.observers import Follower
from gateway.rooms.compare.definition import Definition, WrongArmsError, begun, method_of, next_question
from gateway.rooms.compare.report import better_of, change_of, day_of, page
from gateway.rooms.compare.running import Running
from gateway.rooms.compare.settings import CompareSettings, ComparisonSettings
from gateway.routing.model import Model
from gateway.routing.router import Narrowing
from gateway.state.documents import Document
from policies.build import learned_of
from policies.experiment.evidence import BLOCKS
from policies.experiment.verdict import CERTAIN, Stage
from policies.statistics import Statistics

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from gateway.rooms.advice.finding import Finding

log = logging.getLogger(__name__)

_JUDGE_S: Final = 10.0
_VOID_S: Final = 300.0
"""Seconds in which all gateways read a changed pool file; before that, a change ends no comparison."""
_DOCUMENT: Final = "compare"
_CONFLICT: Final = 409


class Comparing(ComparisonSettings):
    """What to compare; the model may be omitted if there is only one."""

    model: str | None = None


class CompareRoom(Room):
    """Begins and ends comparisons, in which all gateways of the pool take part."""

    order = 14
    work = ("comparisons",)

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._running_series = gateway.metrics.gauge("gateway_compare_running")
        self._ratio = gateway.metrics.gauge("gateway_compare_ratio")
        self._shown: dict[str, dict[tuple[str, str], float]] = {}  # ratios of arms, by model
        self.comparisons: dict[str, Running] = {}  # the last of each model
        self._statistics: dict[str, Statistics] = {}
        self._past = _Past(gateway)
        self._waits: dict[str, str] = {}  # why no comparison begins by itself, by model
        self._started_s = math.inf
        self._next_s = math.inf  # until it is started

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return what the settings lack for comparisons that begin by themselves."""
        asked = [name for name, model in settings.models.items() if CompareSettings.of(model) is not None]
        if asked and settings.state is None:
            return f"models.{asked[0]}.compare needs a state, which keeps what was found: leave out `state: none`"
        return ""

    def follow(self) -> Mapping[str, Follower]:
        """Follow the requests of models with a comparison."""
        for name in self.gateway.models:
            if name not in self._statistics:
                self._statistics[name] = Statistics([BLOCKS], time.time)
                self.gateway.state.documents.watch(f"{name}/{_DOCUMENT}", partial(self._apply, name))
        return self._present()

    def narrow(self) -> Mapping[str, Narrowing]:
        """Return the running comparisons, which assign requests to arms, by model."""
        return self._present()

    def _present(self) -> dict[str, Running]:
        models = self.gateway.models
        return {name: each for name, each in self.comparisons.items() if each.is_running and name in models}

    def _apply(self, model: str, document: Document) -> None:
        """Take part in the comparison that a model's document defines."""
        try:
            definition = Definition.model_validate_json(document.text)
        except ValidationError:
            log.exception("%s cannot be read; nothing is compared", document.name)
            return
        before = self.comparisons.get(model)
        statistics, ids = self._statistics[model], definition.plan().ids
        if before is None or before.plan.ids != ids:
            statistics.drop(BLOCKS, lambda key: key[0] not in ids)
        if before is not None and before.definition.id == definition.id:
            before.go_on(definition)
        else:
            self.gateway.state.share(f"{_DOCUMENT} {model}", statistics)
            self.comparisons[model] = Running(definition, statistics)
        is_known = before is not None and before.definition.id == definition.id
        is_new = not is_known and definition.began_s >= self._started_s
        stage = f"has ended: {definition.stage}" if definition.ended_s else "begins" if is_new else "goes on"
        log.info("%s: the comparison of %s %s", model, " and ".join(definition.replicas), stage)
        if self._started_s < math.inf:
            join(self.gateway)

    def start(self) -> None:
        """Take part from now on."""
        self._started_s, self._next_s = time.time(), 0.0
        join(self.gateway)

    def tick(self) -> None:
        """End comparisons that are decided, and update the series."""
        now_s = time.monotonic()
        if now_s >= self._next_s and (self.running is None or self.running.done()):
            self._next_s = now_s + _JUDGE_S
            self.running = background.start("comparisons", self._judge())

    async def _judge(self) -> None:
        for model, running in [*self.comparisons.items()]:
            if model in self.gateway.models:
                self._running_series.labels(model).set(running.is_running)
                with background.guarded("comparisons", of=model):
                    await self._judge_one(model, running)
        models = self.gateway.settings.models
        asked = {name: section for name, each in models.items() if (section := CompareSettings.of(each)) is not None}
        self._waits = {model: why for model, why in self._waits.items() if model in asked}
        for model, settings in asked.items():
            with background.guarded("comparisons", of=model):
                await self._begin_due(model, settings)

    async def _judge_one(self, model: str, running: Running) -> None:
        if not running.is_running:
            return
        running.close(time.time())
        now_s, policy = time.monotonic(), self.gateway.models[model].policy.name
        if changed := running.definition.changed(self.gateway.pool.of(model), policy):
            if now_s - running.sound_s >= _VOID_S or running.is_over(time.time()):
                sentence = f"It was stopped, since {changed}."
                log.warning("%s: %s", model, sentence)
                await self._end(model, running, Stage.STOPPED, sentence)
            return
        running.sound_s = now_s
        if (fitted := running.fitted()) is not None:
            text = "%s: requests take longer or are fewer than it seemed; blocks of %g s from now on"
            log.info(text, model, fitted.block_s)
            await self._put_first(model, fitted)
            return
        verdict = await asyncio.to_thread(running.judge, time.time())
        ratios = {(each.better, each.other): each.at_mean.ratio for each in verdict.findings}
        # Outdated values become NaN, since no worker can remove a series.
        for arms in self._shown.get(model, {}) | ratios:
            self._ratio.labels(model, *arms).set(ratios.get(arms, math.nan))
        self._shown[model] = ratios
        if verdict.stage is not Stage.RUNNING:
            log.warning("%s: %s", model, verdict.sentence)
            await self._end(model, running, verdict.stage)

    async def _begin_due(self, model: str, settings: CompareSettings) -> None:
        """Begin a comparison that is due by the settings."""
        running = self.comparisons.get(model)
        if running is not None and (running.is_running or time.time() < running.definition.began_s + settings.every_s):
            self._waits[model] = ""
            return
        if _mean_s(self.gateway.models[model]) is None:  # without requests, the length of blocks is unknown
            self._waits[model] = "no request has been answered"
            return
        waits = ""
        try:
            past = [each for each in self._past.of(model) if not each.takes_turns]
            open_for = next_question(settings, self.gateway.pool.of(model), past) if settings.is_open else settings
            await self._put_first(model, self._begun(model, open_for))
        except WrongArmsError as error:
            waits = str(error)
        if waits and waits != self._waits.get(model):
            log.warning("%s: nothing is compared yet: %s", model, waits)
        self._waits[model] = waits

    def _begun(self, model: str, question: ComparisonSettings) -> Definition:
        policy, backends = self.gateway.models[model].policy, self.gateway.pool.of(model)
        learned, settings = learned_of(policy), self.gateway.settings.models[model].backends
        calibration = next((each.simulate.calibration for each in settings.values() if each.simulate is not None), "")
        if learned is not None and "calibration" in learned.settings.model_fields_set:
            calibration = learned.settings.calibration
        mean_s = _mean_s(self.gateway.models[model])
        return begun(question, backends, policy.name, time.time(), mean_s, calibration)

    async def _end(self, model: str, running: Running, stage: Stage, why: str = "") -> None:
        known = await asyncio.to_thread(running.document)
        if running is not self.comparisons[model] or not running.is_running:
            return  # it has ended meanwhile
        result = {name: known[name] for name in known.keys() - Definition.model_fields.keys()}
        result["sentence"] = f"{why} {result['sentence']}".lstrip()
        ended = running.definition.model_copy(update={"ended_s": time.time(), "stage": stage, "result": result})
        await self._put_first(model, ended)

    async def _put_first(self, model: str, definition: Definition) -> None:
        """Store a definition that any gateway may write, unless another one was first."""
        try:
            await self._put(model, definition)
        except GatewayError as error:
            if error.status != _CONFLICT:
                raise

    async def _put(self, model: str, definition: Definition) -> None:
        await put_next(self.gateway.state.documents, f"{model}/{_DOCUMENT}", definition.model_dump_json())

    def compared(self, model: str) -> frozenset[frozenset[str]]:
        """Return the pairs of methods whose comparison is running or has an answer."""
        known = {Stage.RUNNING, Stage.DECIDED, Stage.ALIKE}
        backends = self.gateway.pool.of(model)
        past = [each for each in self._past.of(model) if each.stage in known and not each.takes_turns]
        past = [each for each in past if not each.has_other_engines(backends)]
        return frozenset(frozenset(map(method_of, chain(*each.served.values()))) for each in past)

    def comparing(self, model: str) -> str:
        """Return a sentence on the running comparison and its result so far; empty without one."""
        running = self.comparisons.get(model)
        if running is None or not running.is_running:
            return ""
        arms, shown = " and ".join(running.definition.replicas), running.document()["sentence"]
        return f"{arms} are being compared: {shown} `gateway compare status` has all figures."

    def findings(self, model: str) -> Sequence[Finding]:
        """Return the changes to the current pool that past comparisons advise."""
        if model not in self.comparisons or find_spec("gateway.rooms.advice") is None:
            return ()
        from gateway.rooms.advice.finding import Finding, Gain

        found: list[Finding] = []
        backends, policy = self.gateway.pool.of(model), self.gateway.models[model].policy.name
        for past in self._past.of(model, {Stage.RUNNING, Stage.STOPPED}):  # earlier results still hold
            document = past.document()
            ends, change = better_of(document), change_of(document, past.unchanged(backends))
            if ends is None or not change or not past.still_holds(backends, policy, ends[0]):
                continue
            if not past.advises(backends, ends[0], change):
                continue
            title, gain = document["sentence"], None
            if past.stage is Stage.DECIDED:
                point = document["findings"][0]["at_mean"]
                gain = Gain(1.0 - point["ratio"], 1.0 - point["high"], 1.0 - point["low"], "time of requests", CERTAIN)
                title = f"{ends[0]} serves better than {ends[1]}"
            first = "" if past.policies else next(each.name for each in backends if past.is_of(each, ends[1]))
            found.append(Finding("compared", model, first, title, gain, _evidence(document), change))
        return found

    def add_routes(self, app: FastAPI) -> None:
        """Add `/admin/compare`."""

        @app.get("/admin/compare", tags=["admin"])
        async def compare(model: str | None = None) -> dict[str, Any]:
            """Return the running or last comparison of each model, with its result."""
            names = [*self.comparisons] if model is None else [_named(self.gateway.models, model)]
            waits = {name: why for name, why in self._waits.items() if why and model in {None, name}}
            found = {
                name: await self._document(name)
                for name in names
                if name in self.comparisons and name in self.gateway.models  # a reload may have removed it
            }
            return {"models": found, "waits": waits}

        @app.post("/admin/compare/start", tags=["admin"])
        async def start(asked: Comparing) -> dict[str, Any]:
            """Begin a comparison of a model."""
            model = _named(self.gateway.models, asked.model)
            running = self.comparisons.get(model)
            if running is not None and running.is_running:
                text = f"{' and '.join(running.definition.replicas)} of {model} are being compared"
                raise GatewayError(409, f"{text}; end that first: `gateway compare stop`.", code="already_running")
            try:
                definition = self._begun(model, asked)
            except WrongArmsError as error:
                raise GatewayError(400, f"Nothing is compared: {error}", code="invalid_arms") from None
            await self._put(model, definition)
            return {"model": model, **await self._document(model)}

        @app.post("/admin/compare/stop", tags=["admin"])
        async def stop(asked: ModelReference) -> dict[str, Any]:
            """End the comparison of a model; its result stays."""
            model = _named(self.gateway.models, asked.model)
            running = self.comparisons.get(model)
            if running is None or not running.is_running:
                raise GatewayError(409, f"Nothing of {model} is being compared.", code="not_running")
            await self._end(model, running, Stage.STOPPED)
            return {"model": model, **await self._document(model)}

        @app.get("/admin/compare/report", tags=["admin"], response_class=Response)
        async def report(model: str | None = None) -> Response:
            """Return a page with the result."""
            name = _named(self.gateway.models, model)
            if name not in self.comparisons:
                raise GatewayError(404, f"Nothing of {name} was compared yet.", code="not_found")
            return Response(page(name, await self._document(name)), media_type="text/html; charset=utf-8")

    async def _document(self, model: str) -> dict[str, Any]:
        running, policy = self.comparisons[model], self.gateway.models[model].policy.name
        running.close(time.time())
        document = await asyncio.to_thread(running.document)
        backends = self.gateway.pool.of(model)
        if running.is_running:
            document["sentence"] += running.definition.away(backends)
            if changed := running.definition.changed(backends, policy):
                document["sentence"] += f" But {changed}: it will be stopped unless that ends."
        return document | {"change": change_of(document, running.definition.unchanged(backends))}


class _Past:
    """The past comparisons of each model, from the versions of its document."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[str, dict[int, Definition]] = {}  # by model and version

    def of(self, model: str, without: Collection[Stage] = ()) -> list[Definition]:
        """Return the last comparison of each set of arms, latest first, except those at the stages `without`."""
        before, known = self._known.get(model, {}), dict[int, Definition]()
        for document in reversed(self._gateway.state.documents.history(f"{model}/{_DOCUMENT}")):
            with contextlib.suppress(ValidationError):  # logged on arrival
                definition = before.get(document.version) or Definition.model_validate_json(document.text)
                known[document.version] = definition
        self._known[model] = known
        last: dict[frozenset[tuple[str, ...]], Definition] = {}
        for definition in (each for each in known.values() if each.stage not in without):
            last.setdefault(definition.compared(), definition)
        return [*last.values()]


def _named(known: Collection[str], model: str | None) -> str:
    models = [*known]
    if model is None and len(models) == 1:
        return models[0]
    if model is None:
        raise GatewayError(400, f"Name the model: {', '.join(models)}.", code="model_required")
    if model not in models:
        raise GatewayError(404, f"There is no model {model[:100]}; there are: {', '.join(models)}.")
    return model


def _mean_s(model: Model) -> float | None:
    """Return the mean time of the requests that this process has answered."""
    sums = [upstream.metrics.e2e.totals() for upstream in model.upstreams.values()]
    count = sum(number for _, number in sums)
    return sum(seconds for seconds, _ in sums) / count if count else None


def _evidence(document: Mapping[str, Any]) -> str:
    return f"live traffic of {document['minutes']:g} min on {day_of(document)}, {document['blocks']} blocks of time"
