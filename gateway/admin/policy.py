"""The `/admin/policy` endpoints: rules that the learned policy has written, their versions, and pins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from gateway.admin.policy_versions import PolicyVersions
from gateway.dialects.errors import GatewayError
from gateway.gateway import Gateway


class ModelReference(BaseModel):
    """A model with a learned policy; may be omitted if there is only one."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None


class VersionReference(ModelReference):
    """A version of a model's rules."""

    version: int


def add_policy_routes(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of `/admin/policy`."""

    @router.get("/policy")
    async def policy() -> dict[str, Any]:
        """Return what decides for each model, the versions of its rules, the pinned one, and what was learned."""
        models: dict[str, dict[str, Any]] = {}
        for name, model in [*gateway.models.items()]:
            models[name] = {"policy": model.policy.name}
            if (versions := gateway.policy_versions.get(name)) is not None:
                kinds = await versions.kinds(list(gateway.pool.of(name)))
                models[name] = {**versions.describe(), "kinds": kinds}
        return {"models": models}

    @router.get("/policy/rules")
    async def rules(
        model: str | None = None,
        version: Annotated[int | None, Query(description="The latest by default")] = None,
    ) -> dict[str, Any]:
        """Return one version of the rules, as YAML."""
        versions = versions_of(gateway, model)
        document = versions.rules() if version is None else await versions.find_rules(version)
        return {
            "model": versions.name,
            "version": document.version,
            "written_s": document.written_s,
            "text": document.text,
        }

    @router.post("/policy/distill")
    async def distill(reference: ModelReference) -> dict[str, Any]:
        """Distill what the policy has learned into the next version of the rules; they decide once pinned."""
        versions = versions_of(gateway, reference.model)
        rules, document = await versions.distill(list(gateway.pool.of(versions.name)))
        return {
            "model": versions.name,
            "version": document.version,
            "text": document.text,
            "leaves": len(rules.kinds),
        }

    @router.post("/policy/pin")
    async def pin(reference: VersionReference) -> dict[str, Any]:
        """Route by a version of the rules in all gateways; the policy continues to learn."""
        versions = versions_of(gateway, reference.model)
        await versions.set_pin(reference.version)
        return _description(versions)

    @router.post("/policy/unpin")
    async def unpin(reference: ModelReference) -> dict[str, Any]:
        """Route by the policy itself again."""
        versions = versions_of(gateway, reference.model)
        await versions.set_pin(None)
        return _description(versions)

    @router.post("/policy/rollback")
    async def rollback(reference: ModelReference) -> dict[str, Any]:
        """Undo the last pin or unpin; a second rollback undoes the first."""
        versions = versions_of(gateway, reference.model)
        await versions.rollback()
        return _description(versions)

    @router.post("/policy/thaw")
    async def thaw(reference: ModelReference) -> dict[str, Any]:
        """Resume a policy that its guardrail has frozen, and reset the comparison."""
        versions = versions_of(gateway, reference.model)
        return {"model": versions.name, "thawed": await versions.thaw()}


def _description(versions: PolicyVersions) -> dict[str, Any]:
    return {"model": versions.name, **versions.describe()}


def versions_of(gateway: Gateway, name: str | None) -> PolicyVersions:
    """Return the versions of a model; with None, those of the only model that has any."""
    learning = gateway.policy_versions
    if name is None and len(learning) == 1:
        return next(iter(learning.values()))
    if name is None:
        raise GatewayError(
            400,
            f"Name the model: {', '.join(learning)}."
            if learning
            else "No model of this pool has the policy `learned`.",
        )
    if name not in gateway.models:
        raise GatewayError(404, f"There is no model {name}; there are: {', '.join(gateway.models)}.")
    if name not in learning:
        policy = gateway.models[name].policy.name
        raise GatewayError(409, f"{name} has the policy `{policy}`; only `learned` has rules and pins.")
    return learning[name]
