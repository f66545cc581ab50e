"""Rules made from experience, and pins: which version decides in place of the learned policy, in all gateways.

Three documents of each model: `MODEL/rules`, of which each distillation is a version; `MODEL/pin`, what is pinned now;
`MODEL/thaw`, written when an operator lets a frozen policy go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from backends.backend import Candidate
from gateway.http.errors import GatewayError
from gateway.routing.model import Model
from gateway.state import Conflict, Document, Documents, StateError
from policies.distill.distill import NothingLearnedError, distill
from policies.distill.report import Distilled
from policies.learned.policy import Learned
from policies.rules.policy import Thresholds, ThresholdSettings

log = logging.getLogger(__name__)

_STEPS_BACK = 20
_UNAVAILABLE = 503
_REACHES_ALL_S = 2.0


class Pin(BaseModel):
    """What `MODEL/pin` says; with the rules themselves, so that it holds where their version is no longer kept.

    Parameters
    ----------
    version
        Of the rules that decide; None if the policy itself does.
    before
        What was pinned earlier, the last at the end: where a rollback goes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int | None = None
    rules: str = ""
    before: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyVersions:
    """The rules and pins of one model whose policy learns."""

    name: str
    policy: Learned
    documents: Documents

    def follow(self) -> None:
        """Do from now on what the documents say, whoever changes them; call it before the gateway starts."""
        self.documents.watch(self._pin_name, self._apply)
        self.documents.watch(self._thaw_name, lambda document: self.policy.guardrail.thaw())

    def pin(self) -> Pin:
        """Return what is pinned."""
        document = self.documents.get(self._pin_name)
        return Pin() if document is None else Pin.model_validate_json(document.text)

    def rules(self, version: int | None = None) -> Document:
        """Return one version of the rules, by default the latest.

        Raises
        ------
        GatewayError
            404 if there is none such.
        """
        history = self.documents.history(self._rules_name)
        if not history:
            raise GatewayError(
                404, f"There are no rules for {self.name} yet: `gateway policy distill` makes them from experience."
            )
        found = [one for one in history if version is None or one.version == version]
        if not found:
            there_are = ", ".join(str(one.version) for one in history)
            raise GatewayError(404, f"There is no version {version} of the rules for {self.name}; kept: {there_are}.")
        return found[-1]

    async def find_rules(self, version: int) -> Document:
        """Return one version of the rules, which may just have been made at another worker or gateway.

        Raises
        ------
        GatewayError
            404 if there is none such.
        """
        until_s = time.monotonic() + _REACHES_ALL_S
        while True:
            latest = self.documents.get(self._rules_name)
            is_new = version == (0 if latest is None else latest.version) + 1
            if not is_new or time.monotonic() > until_s:
                return self.rules(version)
            await asyncio.sleep(0.05)

    async def distill(self, candidates: list[Candidate]) -> tuple[Distilled, Document]:
        """Make rules of what is known now, and keep them as the next version; nothing is pinned by that.

        Raises
        ------
        GatewayError
            409 if nothing was learned yet; 503 if they cannot be kept.
        """
        try:
            distilled = await asyncio.to_thread(distill, self.policy, candidates)
        except NothingLearnedError as error:
            raise GatewayError(409, f"There is nothing to make rules of for {self.name}: {error}.") from None
        return distilled, await self._put(self._rules_name, distilled.text)

    async def set_pin(self, version: int | None) -> Pin:
        """Have a version of the rules decide, or with None the policy itself.

        Raises
        ------
        GatewayError
            404 if there is no such version; 409 if it is pinned already; 503 if it cannot be kept.
        """
        present = self.pin()
        if present.version == version:
            what = "nothing" if version is None else f"version {version}"
            raise GatewayError(409, f"{self.name} has {what} pinned already.")
        return await self._put_pin(version, (*present.before, present.version)[-_STEPS_BACK:])

    async def roll_back(self) -> Pin:
        """Go back to what was pinned before.

        Raises
        ------
        GatewayError
            409 if nothing was pinned before; 404 if that version is no longer kept; 503 if it cannot be kept.
        """
        present = self.pin()
        if not present.before:
            raise GatewayError(409, f"There is nothing to roll back to: nothing was pinned for {self.name} before.")
        return await self._put_pin(present.before[-1], present.before[:-1])

    async def thaw(self) -> str:
        """Let a frozen policy go on, and return where that holds."""
        try:
            await self._put(self._thaw_name, "")
        except GatewayError as error:
            self.policy.guardrail.thaw()
            if error.status == _UNAVAILABLE:
                return "this process alone, since what is kept cannot be reached"
        return "all gateways"

    def describe(self) -> dict[str, Any]:
        """Return what decides, and how it fares."""
        pin, guardrail = self.pin(), self.policy.guardrail
        history = self.documents.history(self._rules_name)
        return {
            "policy": self.policy.name,
            "decides": self.policy.name if pin.version is None else f"rules, version {pin.version}",
            "pinned": pin.version,
            "pinned_before": list(pin.before),
            "versions": [{"version": one.version, "written_s": one.written_s} for one in history],
            "frozen": guardrail.frozen,
            "ratio_to_least_loaded": None if math.isnan(guardrail.ratio) else round(guardrail.ratio, 4),
            "ejected": dict(self.policy.outlier_ejection.reasons),
        }

    async def _put_pin(self, version: int | None, before: tuple[int | None, ...]) -> Pin:
        rules = "" if version is None else (await self.find_rules(version)).text
        pin = Pin(version=version, rules=rules, before=before)
        await self._put(self._pin_name, pin.model_dump_json())
        return pin

    async def _put(self, name: str, text: str) -> Document:
        present = self.documents.get(name)
        try:
            return await self.documents.put(name, text, after=0 if present is None else present.version)
        except Conflict as conflict:
            raise GatewayError(409, f"Somebody else was faster: {conflict}. Look again, then repeat.") from None
        except StateError as error:
            raise GatewayError(503, f"It cannot be kept, so it is not done: {error}.") from None

    def _apply(self, document: Document) -> None:
        try:
            pin = Pin.model_validate_json(document.text)
            pinned = None if pin.version is None else Thresholds(settings_of(pin.rules))
        except (ValidationError, ValueError, yaml.YAMLError):
            log.exception("%s cannot be used; what decided before goes on deciding", document.name)
            return
        self.policy.pinned = pinned
        log.warning("%s: %s decides", self.name, self.policy.name if pinned is None else f"version {pin.version}")

    @property
    def _rules_name(self) -> str:
        return f"{self.name}/rules"

    @property
    def _pin_name(self) -> str:
        return f"{self.name}/pin"

    @property
    def _thaw_name(self) -> str:
        return f"{self.name}/thaw"


def settings_of(text: str) -> ThresholdSettings:
    """Return the settings that a version of the rules stands for.

    Raises
    ------
    ValueError
        If it is not the text of a `thresholds` policy.
    """
    document = yaml.safe_load(text)
    if not isinstance(document, dict) or document.pop("name", None) != Thresholds.name:
        raise ValueError("these are not the settings of `thresholds`")
    return ThresholdSettings.model_validate(document)


def pinnings(models: Mapping[str, Model], documents: Documents) -> dict[str, PolicyVersions]:
    """Return those of the models whose policy learns, by name."""
    return {
        name: PolicyVersions(name, model.policy, documents)
        for name, model in models.items()
        if isinstance(model.policy, Learned)
    }
