"""The section `models`: each model with its policy and backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from backends.validation import Issue, did_you_mean, error_of, issues_of
from gateway.config.settings.backend import BackendSettings
from gateway.config.settings.base import Name, Settings
from gateway.config.settings.discover import DiscoverSettings
from gateway.config.settings.queue import QueueSettings
from policies.policy import PolicySettings, policies


class PolicyReference(Settings):
    """A policy by name; all other keys are the policy's own settings.

    Examples
    --------
    >>> PolicyReference.model_validate({"name": "static", "backend": "plain"}).settings.named_backends()
    {('backend',): 'plain'}
    """

    name: str
    settings: SerializeAsAny[PolicySettings] = PolicySettings()

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_policy(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            return data
        if isinstance(data.get("settings"), PolicySettings):
            return data
        registered, name = policies(), data["name"]
        if name not in registered:
            raise error_of(cls.__name__, [Issue(("name",), "no such policy", did_you_mean(name, registered))])
        model = registered[name].Settings
        try:
            settings = model.model_validate({key: value for key, value in data.items() if key != "name"})
        except ValidationError as error:
            raise error_of(cls.__name__, issues_of(error, model)) from None
        return {"name": name, "settings": settings}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return a union over the registered policies: the name and settings of each."""
        references: list[Any] = []
        for name, policy in policies().items():
            literal: Any = Literal[name]
            references.append(
                create_model(f"{policy.__name__}Reference", __base__=policy.Settings, name=(literal, ...))
            )
        return handler(TypeAdapter(reduce(or_, references)).core_schema)


def _by_name(backends: Any) -> Any:
    if isinstance(backends, list):  # a mapping by now, unless that is impossible
        raise ValueError("each of a list is a URL or a mapping, with a `name` that no other has")  # noqa: TRY004
    return backends


def _learned() -> PolicyReference:
    return PolicyReference.model_validate({"name": "learned"})


class ModelSettings(Settings):
    """One model: its replicas, and the policy that chooses among them.

    Parameters
    ----------
    aliases
        Further names that clients may use.
    policy
        Name of the policy, next to its own settings.
    default_temperature
        Temperature that the engines use for requests without one. Needed only if the gateway cannot find it out: it
        asks an engine once, by the Responses API.
    rescue
        Whether another replica resumes a stream whose replica dies, where that is exact: docs/reliability.md.
    ask_usage
        Whether engines are asked for a stream's usage even if its client does not ask for it, and does not get it:
        docs/clients.md. Otherwise its tokens are estimates, and acceptance is not learned from them.
    queue
        A model's queue in the gateway, for requests beyond what its backends should serve at once.
    backends
        The replicas by name.
    discover
        Sources of further replicas by name. A replica that source `fleet` finds is called `fleet/10.0.0.7:8000`.
    """

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["backends"]}, {"required": ["discover"]}]})

    aliases: list[Name] = []
    policy: PolicyReference = Field(default_factory=_learned, json_schema_extra={"default": {"name": "learned"}})
    default_temperature: Annotated[float, Field(ge=0)] | None = None
    rescue: bool = True
    ask_usage: bool = True
    queue: QueueSettings | None = None
    backends: Annotated[dict[Name, BackendSettings], BeforeValidator(_by_name)] = {}
    discover: dict[Name, DiscoverSettings] = {}

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if there are no backends, and for each that the policy names but the model lacks."""
        backends, discover = data.get("backends"), data.get("discover")
        if not backends and not discover:
            yield Issue(("backends",) if "backends" in data else (), "no replica, and no discover", "set one of them")
            return
        sources = {str(source) for source in discover} if isinstance(discover, Mapping) else set()
        try:
            settings = PolicyReference.model_validate(data.get("policy")).settings
        except ValidationError:
            return  # reported with the policy itself
        for path, name in settings.named_backends().items():
            known = [str(backend) for backend in backends] if isinstance(backends, Mapping) else []
            if name not in known and name.partition("/")[0] not in sources:
                hint = did_you_mean(name, known)
                yield Issue(("policy", *path), f"this model has no backend '{name}'", hint)
