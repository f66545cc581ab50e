"""Versions of the rules that a learned policy has written, and the pin that selects one in all gateways.

Each model has three documents: `MODEL/rules`, with a version per distillation; `MODEL/pin`, the current pin; and
`MODEL/thaw`, written when an operator resumes a frozen policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from backends.backend import Candidate
from gateway.admin.documents import put_next
from gateway.dialects.errors import GatewayError
from gateway.routing.model import Model
from gateway.state.documents import Document, Documents
from policies.guarded.guardrail import CONFIDENCE, Guardrail
from policies.learned.detector import Detector
from policies.learned.known import Known
from policies.learned.policy import Learned
from policies.learned.thresholds import NothingLearnedError, Rules, in_words, rules_of
from policies.policy import Policy
from policies.rules.policy import Thresholds, ThresholdSettings

log = logging.getLogger(__name__)

_UNAVAILABLE = 503
_PROPAGATION_S = 2.0


class Pin(BaseModel):
    """Content of `MODEL/pin`, including the rules, so that a pin survives the removal of its version.

    Examples
    --------
    >>> Pin.model_validate_json(Pin(version=2).model_dump_json()).version
    2
    """

    model_config = ConfigDict(extra="ignore", frozen=True)  # pins of other versions may have more keys

    version: int | None = None  # version of the rules that decides; None if the policy itself decides
    rules: str = ""  # text of that version


@dataclass(frozen=True, slots=True)
class PolicyVersions:
    """Rules, pins and guardrail of one model; only `learned` has rules and pins."""

    name: str
    policy: Policy
    guardrail: Guardrail
    detector: Detector[Any] | None
    documents: Documents

    def follow(self) -> None:
        """Apply the documents now and whenever they change; called before the gateway starts."""
        if isinstance(self.policy, Learned):
            self.documents.watch(self._document("pin"), partial(self._apply, self.policy))
        name = self._document("thaw")
        self.documents.watch(name, partial(self._thaw, self.documents.get(name)))

    def unfollow(self) -> None:
        """Stop applying the documents: the policy is gone."""
        self.documents.unwatch(self._document("pin"))
        self.documents.unwatch(self._document("thaw"))

    def pin(self) -> Pin:
        """Return the current pin; an empty one if none is stored, or it cannot be read."""
        document = self.documents.get(self._document("pin"))
        with contextlib.suppress(ValidationError):
            return Pin() if document is None else Pin.model_validate_json(document.text)
        return Pin()

    def rules(self, version: int | None = None) -> Document:
        """Return one version of the rules, the latest by default."""
        history = self.documents.history(self._document("rules"))
        if not history:
            raise GatewayError(
                404, f"There are no rules for {self.name} yet; create them with `gateway policy distill`."
            )
        matching = [document for document in history if version is None or document.version == version]
        if not matching:
            kept = ", ".join(str(document.version) for document in history)
            raise GatewayError(404, f"There is no version {version} of the rules for {self.name}; kept: {kept}.")
        return matching[-1]

    async def find_rules(self, version: int) -> Document:
        """Return one version of the rules; wait for it if another process may just have stored it."""
        end_s = time.monotonic() + _PROPAGATION_S
        while True:
            latest = self.documents.get(self._document("rules"))
            is_new = version == (0 if latest is None else latest.version) + 1
            if not is_new or time.monotonic() > end_s:
                return self.rules(version)
            await asyncio.sleep(0.05)

    async def kinds(self, candidates: list[Candidate]) -> list[str]:
        """Return a line for each kind of request that the policy has seen."""
        if not isinstance(self.policy, Learned):
            return []
        return await asyncio.to_thread(in_words, _known(self.policy, candidates), candidates)

    async def distill(self, candidates: list[Candidate]) -> tuple[Rules, Document]:
        """Distill what the policy has learned into the next version of the rules, without pinning it."""
        known = _known(self._learned(), candidates)
        try:
            rules = await asyncio.to_thread(rules_of, known, candidates)
        except NothingLearnedError as error:
            raise GatewayError(409, f"Rules for {self.name} cannot be distilled: {error}.") from None
        return rules, await self._put(self._document("rules"), rules.text)

    async def set_pin(self, version: int | None) -> None:
        """Pin a version of the rules, or None for the policy itself."""
        self._learned()
        current = self.pin()
        if current.version == version:
            what = "nothing" if version is None else f"version {version}"
            raise GatewayError(409, f"{self.name} has {what} pinned already.")
        rules = "" if version is None else (await self.find_rules(version)).text
        await self._put(self._document("pin"), Pin(version=version, rules=rules).model_dump_json())

    async def rollback(self) -> None:
        """Restore the pin before its last change; if that was the first, let the policy itself decide again."""
        self._learned()
        history = self.documents.history(self._document("pin"))
        if not history:
            raise GatewayError(409, f"{self.name} has nothing to go back to: nothing was ever pinned.")
        before = history[-2].text if len(history) > 1 else Pin().model_dump_json()
        await self._put(self._document("pin"), before)

    async def thaw(self) -> str:
        """Resume a frozen policy, and return where that takes effect."""
        try:
            await self._put(self._document("thaw"), "")
        except GatewayError as error:
            self.guardrail.thaw()
            if error.status == _UNAVAILABLE:
                return "this process alone, because the store cannot be reached"
        return "all gateways"

    def describe(self) -> dict[str, Any]:
        """Return the pin, the versions and the state of the guardrail, as `/admin/policy` shows them."""
        pin, guardrail = self.pin(), self.guardrail
        found = guardrail.comparison(CONFIDENCE)
        history = self.documents.history(self._document("rules"))
        return {
            "policy": self.policy.name,
            "decides": self.policy.name if pin.version is None else f"rules, version {pin.version}",
            "pinned": pin.version,
            "versions": [{"version": each.version, "written_s": each.written_s} for each in history],
            "frozen": guardrail.frozen,
            "ratio_to_least_loaded": None if math.isnan(found.ratio) else round(found.ratio, 4),
            "ratio_interval": None if math.isnan(found.ratio) else [round(found.low, 4), round(found.high, 4)],
            "ejected": {} if self.detector is None else dict(self.detector.reasons),
        }

    async def _put(self, name: str, text: str) -> Document:
        return await put_next(self.documents, name, text)

    def _apply(self, policy: Learned, document: Document) -> None:
        try:
            pin = Pin.model_validate_json(document.text)
            pinned = None if pin.version is None else Thresholds(settings_of(pin.rules))
        except (ValidationError, ValueError, yaml.YAMLError):
            log.exception("%s cannot be used; the previous pin stays in effect", document.name)
            return
        policy.pinned = pinned
        log.warning("%s: %s decides", self.name, self.policy.name if pinned is None else f"version {pin.version}")

    def _thaw(self, known: Document | None, document: Document) -> None:
        """Thaw the guardrail, unless that was done for the policy before it, which has the same guardrail."""
        if document != known:
            self.guardrail.thaw()

    def _learned(self) -> Learned:
        if isinstance(self.policy, Learned):
            return self.policy
        raise GatewayError(409, f"{self.name} has the policy `{self.policy.name}`; only `learned` has rules and pins.")

    def _document(self, content: Literal["rules", "pin", "thaw"]) -> str:
        return f"{self.name}/{content}"


def _known(learned: Learned, candidates: list[Candidate]) -> Known:
    """Return what a policy knows, for a thread; the candidates are added here, since no other thread may do that."""
    for candidate in candidates:
        learned.known.replica(candidate)
    return learned.known


def settings_of(text: str) -> ThresholdSettings:
    r"""Return the settings of the `thresholds` policy in the text of a version.

    Examples
    --------
    >>> settings_of("name: thresholds\nrules: [{name: default, prefer: [ngram]}]").rules[0].prefer
    ('ngram',)
    """
    document = yaml.safe_load(text)
    if not isinstance(document, dict) or document.pop("name", None) != Thresholds.name:
        raise ValueError("these are not the settings of `thresholds`")
    return ThresholdSettings.model_validate(document)


def policy_versions_of(models: Mapping[str, Model], documents: Documents) -> dict[str, PolicyVersions]:
    """Return the versions of each model whose policy has a guardrail, by model."""
    return {
        name: PolicyVersions(name, model.policy, model.guardrail, model.detector, documents)
        for name, model in models.items()
        if model.guardrail is not None
    }
