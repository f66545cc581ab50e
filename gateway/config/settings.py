"""The pool file as typed settings: what every key means, its default, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    SecretStr,
    SerializeAsAny,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from backends.speculation import Method, SpeculativeConfig, method_faults, serve_config
from backends.validation import Issue, did_you_mean, error_of, issues_of
from gateway.config.checks import pool_faults
from gateway.config.urls import address
from policies.policy import PolicySettings, policies


def _checked_name(name: str) -> str:
    if not name or not all(character.isascii() and (character.isalnum() or character in "._:/-") for character in name):
        raise ValueError("a name is made of letters, digits and . _ : / -")
    return name


def _none_if_empty(secret: Any) -> Any:
    # An unset variable with an empty default (`${KEY:-}`) means that there is no key, never that the key is empty.
    return None if secret == "" or (isinstance(secret, SecretStr) and not secret.get_secret_value()) else secret


def _as_text(value: Any) -> Any:
    # `flags: [--max-model-len, 2048]` and `env: {OMP_NUM_THREADS: 1}` are what a person writes.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Name = Annotated[str, AfterValidator(_checked_name)]
Secret = Annotated[SecretStr | None, BeforeValidator(_none_if_empty)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Word = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "number"]})]


class Settings(BaseModel):
    """Base of the settings: unknown keys are errors, and all errors of a model are raised at once with their paths."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield what is wrong between the keys of `data`, which need not be of the right types."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found = list(cls.issues(data)) if isinstance(data, Mapping) else []
        try:
            settings = handler(data)
        except ValidationError as error:
            raise error_of(cls.__name__, [*issues_of(error, cls), *found]) from None
        if found:
            raise error_of(cls.__name__, found)
        return settings


class ServerSettings(Settings):
    """Where the gateway listens, and how much it takes.

    Parameters
    ----------
    port
        0 takes a free one.
    drain_s
        How long requests under way may still run after SIGTERM.
    max_body_mib
        The largest request body; a larger one is answered 413.
    max_in_flight
        Requests under way at once, over all models; more are answered 503. None sets no limit.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    workers: Count = 1
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    max_body_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 64.0
    max_in_flight: Count | None = None


class TimeoutSettings(Settings):
    """How long the gateway waits for a backend: to connect, for the first byte of its answer, and between two bytes."""

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 600.0
    idle_s: Seconds = 60.0


class HealthSettings(Settings):
    """How backends are checked.

    Parameters
    ----------
    interval_s, timeout_s
        Time between two checks of a backend, and until one counts as failed.
    eject_s, eject_max_s
        How long a backend with broken answers is left out the first time; each further time twice as long, up to the
        maximum.
    """

    interval_s: Seconds = 2.0
    timeout_s: Seconds = 2.0
    eject_s: Seconds = 2.0
    eject_max_s: Seconds = 60.0

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an ejection that starts above its maximum."""
        first, most = data.get("eject_s", 2.0), data.get("eject_max_s", 60.0)
        if isinstance(first, int | float) and isinstance(most, int | float) and first > most:
            yield Issue(("eject_s",), f"greater than eject_max_s, {most}")


class SloSettings(Settings):
    """In what time a key's requests are to be answered, where they do not say it themselves.

    Parameters
    ----------
    ttft_ms
        Milliseconds to the first token.
    tpot_ms
        Milliseconds per output token after it.
    """

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an SLO that promises nothing."""
        if not data:
            yield Issue((), "has neither ttft_ms nor tpot_ms", "give one of them, or take it out")


class KeySettings(Settings):
    """An API key of a client, as it is or as the SHA-256 of it, and what it may do.

    Parameters
    ----------
    name
        Stands for the key in logs and metrics.
    models
        The models it may use, by their own names, which lets it use their aliases too; None for all.
    may_override
        Whether its requests may choose their backend (`x-gateway-backend`, `x-gateway-method`).
    requests_per_minute, tokens_per_minute, max_in_flight
        Its limits; None for none.
    slo
        For policies with the objective `goodput`; the headers of a request come before it.
    """

    name: Name
    key: Secret = None
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)] | None = None
    models: Annotated[list[Name], Field(min_length=1)] | None = None
    may_override: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_in_flight: Count | None = None
    slo: SloSettings | None = None

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield a key given in two ways or in none."""
        given = [way for way in ("key", "sha256") if _none_if_empty(data.get(way)) is not None]
        if len(given) == 2:
            yield Issue(("sha256",), "given beside key", "give one of the two", at_key=True)
        elif not given and "key" in data:
            yield Issue(("key",), "the key is empty", "set its variable, or take the entry out")
        elif not given:
            yield Issue((), "has neither key nor sha256", "give one of the two")


class AdminSettings(Settings):
    """The key of `/admin`. None: the gateway makes one at start and prints it."""

    key: Secret = None


def _known_redis_url(url: SecretStr | None) -> SecretStr | None:
    if url is None:
        return None
    if find_spec("redis") is None:
        raise ValueError("needs the package redis: pip install 'speculation-gateway[redis]'")
    from redis.connection import parse_url

    try:
        parse_url(url.get_secret_value())  # type: ignore[no-untyped-call]
    except ValueError:  # its text may show a part of the password
        raise ValueError("expected redis://host:port/database, rediss://... for TLS, or unix:///path/to.sock") from None
    return url


class StateSettings(Settings):
    """Where what is learned is kept: in a file, or in a Redis that several gateways share.

    Parameters
    ----------
    file
        An SQLite file on a local disk. None: one for each pool file, in the user's folder for such things.
    redis
        `redis://[user:password@]host[:port][/database]`, `rediss://...` for TLS, or `unix:///path/to.sock`.
    prefix
        What the names of its keys in Redis begin with; gateways of the same pool have the same.
    """

    file: Annotated[Path | None, BeforeValidator(_none_if_empty)] = None
    redis: Annotated[Secret, AfterValidator(_known_redis_url)] = None
    prefix: Name = "gateway"

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield a file and a Redis given both."""
        if data.get("file") is not None and _none_if_empty(data.get("redis")) is not None:
            yield Issue(("redis",), "given beside file", "give one of the two", at_key=True)


def _none_if_said(state: Any) -> Any:
    if state == "none":
        return None
    if not isinstance(state, Mapping | StateSettings):
        raise ValueError("expected `none`, or a mapping with `file` or `redis`")  # noqa: TRY004 -- as pydantic wants it
    return state


_StateSaid = StateSettings | Literal["none"]
State = Annotated[StateSettings | None, BeforeValidator(_none_if_said, json_schema_input_type=_StateSaid)]


class RecorderSettings(Settings):
    """Whether and how requests are recorded: one line of JSON a request, in files that `gateway trace` reads.

    Parameters
    ----------
    path
        Folder of the files; it is made if it is not there.
    text
        What is kept of prompts and answers: nothing (`none`), hashes on which n-gram and suffix drafting can be
        replayed (`hashes`), or the text itself (`full`).
    sample
        Share of the requests that are recorded, drawn by chance.
    compression
        `zstd` or `none`.
    flush_s
        Seconds from one writing to the next: what is lost at most when the process is killed.
    rotate_mib, rotate_s
        Size and age at which a file is closed and the next begun.
    keep_s, keep_mib
        Files are removed when they were last written to this long ago, and the oldest when all take more than this;
        None keeps them.
    queue, queue_mib
        Requests and their texts that may wait to be written; what would be more is not recorded, and counted.
    max_text_kib
        A longer request body, or a longer answer with what frames it, is left out of its record.
    hash_salt
        Secret of the hashes; None makes one at each start, so that hashes of different runs cannot be compared.
    hash_ngram
        Tokens that each hash stands for.
    tokenizer
        A `tokenizer.json`, or a folder that holds one: the model's, so that hashes are of its tokens. None: of words,
        numbers and marks.
    """

    path: Path
    text: Literal["none", "hashes", "full"] = "none"
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    compression: Literal["zstd", "none"] = "zstd"
    flush_s: Seconds = 1.0
    rotate_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 256.0
    rotate_s: Seconds = 3600.0
    keep_s: Seconds | None = None
    keep_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    queue: Count = 10000
    queue_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 64.0
    max_text_kib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1024.0
    hash_salt: Secret = None
    hash_ngram: Annotated[int, Field(ge=1, le=16)] = 1
    tokenizer: Path | None = None


class ServeSettings(Settings):
    """An engine that the gateway starts: `command model flags...`, with `--port` and `--speculative-config` added.

    Parameters
    ----------
    command
        The words before the model.
    model
        Name or path of the target model.
    env
        Added to the gateway's own environment.
    startup_timeout_s
        How long until it must answer its health check.
    """

    command: Annotated[list[Word], Field(min_length=1)] = ["vllm", "serve"]
    model: Annotated[str, Field(min_length=1)]
    flags: list[Word] = []
    env: dict[str, Word] = {}
    startup_timeout_s: Seconds = 900.0

    _ours: ClassVar[Mapping[str, str]] = {
        "--host": "the gateway chooses the address",
        "--port": "the gateway chooses the port",
        "--uds": "the gateway chooses the address",
        "--speculative-config": "say it under speculative_config",
        "-sc": "say it under speculative_config",
        "--api-key": "say it under api_key",
    }

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield the flags that the gateway gives itself."""
        flags = data.get("flags")
        for index, flag in enumerate(flags if isinstance(flags, list) else []):
            name = str(flag).split("=")[0].split(".")[0].replace("_", "-")
            if name in cls._ours:
                yield Issue(("flags", index), f"{name} is not yours to give", cls._ours[name])


def _known_calibration(name: str) -> str:
    from backends.calibration.calibration import calibration_names

    if name not in calibration_names():
        raise ValueError(f"no such calibration; {did_you_mean(name, calibration_names())}")
    return name


class SimulateSettings(Settings):
    """A replica of the built-in simulator.

    Parameters
    ----------
    calibration
        Name of the model and hardware whose step times and acceptance it has.
    seed
        Of the chance in what is accepted.
    max_model_len
        Longest context, in tokens.
    time_scale
        Seconds of the clock for each simulated second: 0.1 runs ten times as fast.
    """

    calibration: Annotated[str, AfterValidator(_known_calibration)]
    seed: int = 0
    max_model_len: Annotated[int, Field(ge=2)] = 8192
    time_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class BackendSettings(Settings):
    """One replica: how it speculates, and where it is (`url`), how it is started (`serve`) or what it simulates.

    One of the three, and only one.

    Parameters
    ----------
    url
        `http://host:port`, `https://host:port` or `unix:/path/to.sock`.
    api_key
        Sent to the engine as a bearer token.
    weight
        Its share of the requests relative to the others, for the policies that go by it.
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [home]} for home in ("url", "serve", "simulate")]}
    )

    method: Method
    url: Annotated[str, AfterValidator(address)] | None = None
    serve: ServeSettings | None = None
    simulate: SimulateSettings | None = None
    speculative_config: SpeculativeConfig | None = None
    api_key: Secret = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield two homes or none, and what the method lacks."""
        locations = [home for home in ("url", "serve", "simulate") if data.get(home) is not None]
        if not locations:
            yield Issue((), "has none of url, serve and simulate", "give one, which says where the replica is")
        for home in locations[1:]:
            yield Issue(
                (home,), f"given beside {locations[0]}", "a backend has one of url, serve and simulate", at_key=True
            )
        config = data.get("speculative_config")
        if data.get("method") in set(Method) and (config is None or isinstance(config, Mapping | SpeculativeConfig)):
            raw = config.model_dump(exclude_unset=True) if isinstance(config, SpeculativeConfig) else config
            for issue in method_faults(Method(data["method"]), raw, served="serve" in locations):
                yield issue.below("speculative_config")

    @model_validator(mode="after")
    def _can_be_simulated(self) -> Self:
        if self.simulate is None:
            return self
        from backends.simulator.server.settings import ReplicaSettings

        try:
            ReplicaSettings(
                name="checked",
                model="checked",
                method=self.method,
                speculative_config=serve_config(self.method, self.speculative_config),
                calibration=self.simulate.calibration,
                max_model_len=self.simulate.max_model_len,
            )
        except ValidationError as error:
            found = [issue.below("simulate") for issue in issues_of(error, ReplicaSettings)]
            raise error_of(type(self).__name__, found) from None
        return self


class PolicyReference(Settings):
    """A policy by its name; whatever stands beside the name is the policy's own settings."""

    name: str
    settings: SerializeAsAny[PolicySettings] = PolicySettings()

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_policy(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            return data
        if isinstance(data.get("settings"), PolicySettings):
            return data
        known = policies()
        if data["name"] not in known:
            raise error_of(cls.__name__, [Issue(("name",), "no such policy", did_you_mean(data["name"], known))])
        own = known[data["name"]].Settings
        try:
            settings = own.model_validate({key: value for key, value in data.items() if key != "name"})
        except ValidationError as error:
            raise error_of(cls.__name__, issues_of(error, own)) from None
        return {"name": data["name"], "settings": settings}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the choice among the registered policies, each with its name beside its own settings."""
        each: list[Any] = []
        for name, policy in policies().items():
            own_name: Any = Literal[name]
            each.append(create_model(f"{policy.__name__}Reference", __base__=policy.Settings, name=(own_name, ...)))
        return handler(TypeAdapter(reduce(or_, each)).core_schema)


class ModelSettings(Settings):
    """One model: the replicas that serve it, and the policy that chooses among them.

    Parameters
    ----------
    aliases
        Further names that clients may ask for.
    default_temperature
        Taken for a request that has none; vLLM's default is 1.0 unless the model's own generation config says more.
    """

    aliases: list[Name] = []
    policy: PolicyReference
    default_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    backends: Annotated[dict[Name, BackendSettings], Field(min_length=1)]

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield the backends that the policy names and the model does not have."""
        backends = data.get("backends")
        try:
            settings = PolicyReference.model_validate(data.get("policy")).settings
        except ValidationError:
            return  # reported with the policy itself
        for path, name in settings.named_backends().items():
            if isinstance(backends, Mapping) and name not in backends:
                hint = did_you_mean(name, map(str, backends))
                yield Issue(("policy", *path), f"this model has no backend '{name}'", hint)


def _named(keys: Any) -> Any:
    if not isinstance(keys, list):
        return keys
    return [
        key if isinstance(key, Mapping | KeySettings | list) else {"name": f"key-{place}", "key": key}
        for place, key in enumerate(keys, 1)
    ]


class PoolSettings(Settings):
    """The whole pool file. Keys that begin with `x-` are the operator's own, for anchors.

    Parameters
    ----------
    models
        By the name that clients ask for.
    keys
        Who may ask; a bare string is a key that may use every model, named `key-1` and so on by its place. Without
        any the gateway is open.
    recorder
        None records nothing.
    state
        `none` keeps nothing.
    """

    model_config = ConfigDict(json_schema_extra={"patternProperties": {"^x-": {}}})

    server: ServerSettings = ServerSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    health: HealthSettings = HealthSettings()
    models: Annotated[dict[Name, ModelSettings], Field(min_length=1)]
    keys: Annotated[list[KeySettings], BeforeValidator(_named)] = []
    admin: AdminSettings = AdminSettings()
    recorder: RecorderSettings | None = None
    state: State = StateSettings()

    @model_validator(mode="before")
    @classmethod
    def _without_own_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if not str(key).startswith("x-")}

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield what cannot stand together in one pool."""
        yield from pool_faults(data)
