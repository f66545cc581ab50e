"""`/admin/policy`: what decides, rules from experience, and which of their versions is pinned."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from gateway.http.errors import GatewayError
from gateway.service.assembly import Gateway
from gateway.service.policy_versions import PolicyVersions


class Which(BaseModel):
    """The model that is meant; it may be left out where only one learns."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None


class WhichVersion(Which):
    """A version of a model's rules."""

    version: int


def add_policy_routes(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes under `/admin/policy`."""

    @router.get("/policy")
    async def policy() -> dict[str, Any]:
        """Tell for each model what decides, which versions of its rules are kept, and which one is pinned."""
        return {
            "models": {
                name: gateway.pinnings[name].describe() if name in gateway.pinnings else {"policy": model.policy.name}
                for name, model in gateway.models.items()
            }
        }

    @router.get("/policy/rules")
    async def rules(
        model: str | None = None,
        version: Annotated[int | None, Query(description="By default the latest")] = None,
    ) -> dict[str, Any]:
        """Return one version of the rules, as YAML."""
        meant = _meant(gateway, model)
        document = meant.rules() if version is None else await meant.find_rules(version)
        return {
            "model": meant.name,
            "version": document.version,
            "written_s": document.written_s,
            "text": document.text,
        }

    @router.post("/policy/distill")
    async def distill(which: Which) -> dict[str, Any]:
        """Make rules of what was learned, and keep them as the next version; they decide only once pinned."""
        meant = _meant(gateway, which.model)
        distilled, document = await meant.distill(list(gateway.pool.of(meant.name)))
        return {
            "model": meant.name,
            "version": document.version,
            "kept_share": distilled.kept_share,
            "learned_gain": distilled.learned_gain,
            "rules_gain": distilled.rules_gain,
            "leaves": len(distilled.leaves),
            "text": document.text,
        }

    @router.post("/policy/pin")
    async def pin(which: WhichVersion) -> dict[str, Any]:
        """Have a version of the rules decide in place of the policy, in all gateways; it goes on learning."""
        meant = _meant(gateway, which.model)
        await meant.set_pin(which.version)
        return _told(meant)

    @router.post("/policy/unpin")
    async def unpin(which: Which) -> dict[str, Any]:
        """Let the policy itself decide again."""
        meant = _meant(gateway, which.model)
        await meant.set_pin(None)
        return _told(meant)

    @router.post("/policy/rollback")
    async def rollback(which: Which) -> dict[str, Any]:
        """Go back to what was pinned before, or to nothing pinned."""
        meant = _meant(gateway, which.model)
        await meant.roll_back()
        return _told(meant)

    @router.post("/policy/thaw")
    async def thaw(which: Which) -> dict[str, Any]:
        """Let a policy that froze itself go on, and forget what was held against it."""
        meant = _meant(gateway, which.model)
        return {"model": meant.name, "thawed": await meant.thaw()}


def _told(meant: PolicyVersions) -> dict[str, Any]:
    return {"model": meant.name, **meant.describe()}


def _meant(gateway: Gateway, name: str | None) -> PolicyVersions:
    known = gateway.pinnings
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None:
        raise GatewayError(
            400, f"Name the model: {', '.join(known)}." if known else "No model of this pool has the policy `learned`."
        )
    if name not in gateway.models:
        raise GatewayError(404, f"There is no model {name}; there are: {', '.join(gateway.models)}.")
    if name not in known:
        policy = gateway.models[name].policy.name
        raise GatewayError(409, f"{name} has the policy `{policy}`; only `learned` makes rules and takes pins.")
    return known[name]
