"""The pool file as typed settings: each key, its meaning, its default and its constraints.

The docstrings of the classes become the explanations in the JSON schema (`gateway.config.schema`).
"""

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

from backends.speculation import Method, SpeculativeConfig, method_issues, serve_config
from backends.validation import Issue, did_you_mean, error_of, issues_of
from gateway.config.checks import pool_issues
from gateway.config.urls import address
from policies.policy import PolicySettings, policies


def _checked_name(name: str) -> str:
    if not name or not all(character.isascii() and (character.isalnum() or character in "._:/-") for character in name):
        raise ValueError("a name is made of letters, digits and . _ : / -")
    return name


def _none_if_empty(secret: Any) -> Any:
    # An unset variable with an empty default (`${KEY:-}`) means no key, not an empty key.
    return None if secret == "" or (isinstance(secret, SecretStr) and not secret.get_secret_value()) else secret


def _as_text(value: Any) -> Any:
    # Users write numbers unquoted: `flags: [--max-model-len, 2048]`, `env: {OMP_NUM_THREADS: 1}`.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Name = Annotated[str, AfterValidator(_checked_name)]
Secret = Annotated[SecretStr | None, BeforeValidator(_none_if_empty)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Word = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "number"]})]


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, and all errors are raised together, each with its path."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield conflicts between the keys of `data`, whose values may have the wrong types."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        conflicts = list(cls.issues(data)) if isinstance(data, Mapping) else []
        try:
            settings = handler(data)
        except ValidationError as error:
            raise error_of(cls.__name__, [*issues_of(error, cls), *conflicts]) from None
        if conflicts:
            raise error_of(cls.__name__, conflicts)
        return settings


class ServerSettings(Settings):
    """Address, processes and limits of the gateway.

    Parameters
    ----------
    host
        Address to listen on.
    port
        Port to listen on; 0 picks a free one.
    workers
        Number of worker processes, all listening on the same port.
    drain_s
        Seconds that requests in flight may still run after SIGTERM.
    max_body_mib
        Largest request body, in MiB; a larger one is answered with 413.
    max_in_flight
        Most requests in flight at once, over all models and workers; further ones are answered with 503. Null sets no
        limit.

    Examples
    --------
    >>> ServerSettings(port=0).host
    '127.0.0.1'
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    workers: Count = 1
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    max_body_mib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 64.0
    max_in_flight: Count | None = None


class TimeoutSettings(Settings):
    """Timeouts of a request to a backend.

    Parameters
    ----------
    connect_s
        Seconds to connect.
    first_byte_s
        Seconds from the end of the request to the first byte of the response; without streaming, to all of it.
    idle_s
        Seconds between two parts of a response.
    """

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 600.0
    idle_s: Seconds = 60.0


class HealthSettings(Settings):
    """Health checks, and ejection of backends that answer with errors.

    Parameters
    ----------
    interval_s
        Seconds between two checks of a backend.
    timeout_s
        Seconds after which a check counts as failed.
    eject_s
        Seconds that a failing backend is ejected for the first time; each further ejection lasts twice as long.
    eject_max_s
        Longest ejection, in seconds.
    """

    interval_s: Seconds = 2.0
    timeout_s: Seconds = 2.0
    eject_s: Seconds = 2.0
    eject_max_s: Seconds = 60.0

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if the first ejection is longer than the longest."""
        first_s, longest_s = data.get("eject_s", 2.0), data.get("eject_max_s", 60.0)
        if isinstance(first_s, int | float) and isinstance(longest_s, int | float) and first_s > longest_s:
            yield Issue(("eject_s",), f"greater than eject_max_s, {longest_s}")


class SloSettings(Settings):
    """Latency objective of a key's requests, for those that do not set their own by headers.

    Parameters
    ----------
    ttft_ms
        Time to first token, in milliseconds.
    tpot_ms
        Time per output token after the first, in milliseconds.
    """

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if the objective is empty."""
        if not data:
            yield Issue((), "has neither ttft_ms nor tpot_ms", "set one of them, or remove slo")


class KeySettings(Settings):
    """An API key of a client, with its permissions and limits.

    Parameters
    ----------
    name
        Name of the key in logs and metrics.
    key
        The key itself; alternatively give its `sha256`.
    sha256
        SHA-256 of the key, in hexadecimal.
    models
        Models that the key may use, by name; aliases are included. Null allows all.
    may_override
        Whether its requests may choose their backend (`x-gateway-backend`, `x-gateway-method`).
    requests_per_minute
        Limit on requests per minute; null sets none.
    tokens_per_minute
        Limit on prompt and output tokens per minute; null sets none.
    max_in_flight
        Limit on requests in flight at once; null sets none.
    slo
        Latency objective for policies with the objective `goodput`; headers of a request take precedence.

    Examples
    --------
    >>> key = KeySettings(name="batch", key="sk-1", requests_per_minute=60)
    >>> key.key
    SecretStr('**********')
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
        """Yield an issue unless exactly one of `key` and `sha256` is set."""
        present = [field for field in ("key", "sha256") if _none_if_empty(data.get(field)) is not None]
        if len(present) == 2:
            yield Issue(("sha256",), "set together with key", "keep one of the two", at_key=True)
        elif not present and "key" in data:
            yield Issue(("key",), "the key is empty", "set its variable, or remove the entry")
        elif not present:
            yield Issue((), "has neither key nor sha256", "set one of the two")


class AdminSettings(Settings):
    """Access to `/admin`.

    Parameters
    ----------
    key
        The admin key. Null makes the gateway generate one at start and print it.
    """

    key: Secret = None


def _known_redis_url(url: SecretStr | None) -> SecretStr | None:
    if url is None:
        return None
    if find_spec("redis") is None:
        raise ValueError("needs the package redis: pip install 'speculation-gateway[redis]'")
    from redis.connection import parse_url

    try:
        parse_url(url.get_secret_value())  # type: ignore[no-untyped-call]
    except ValueError:  # its message may contain part of the password
        raise ValueError("expected redis://host:port/database, rediss://... for TLS, or unix:///path/to.sock") from None
    return url


class StateSettings(Settings):
    """Store of learned statistics and rules: an SQLite file, or a Redis that several gateways share.

    Parameters
    ----------
    file
        SQLite file on a local disk. Null, without `redis`, uses one file per pool file in the user's state folder.
    redis
        `redis://[user:password@]host[:port][/database]`, `rediss://...` for TLS, or `unix:///path/to.sock`.
    prefix
        Prefix of the gateway's keys in Redis; gateways of the same pool need the same one.
    """

    file: Annotated[Path | None, BeforeValidator(_none_if_empty)] = None
    redis: Annotated[Secret, AfterValidator(_known_redis_url)] = None
    prefix: Name = "gateway"

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if both a file and a Redis are set."""
        if data.get("file") is not None and _none_if_empty(data.get("redis")) is not None:
            yield Issue(("redis",), "set together with file", "keep one of the two", at_key=True)


def _read_state(state: Any) -> Any:
    if state == "none":
        return None
    if not isinstance(state, Mapping | StateSettings):
        raise ValueError("expected `none`, or a mapping with `file` or `redis`")  # noqa: TRY004 -- pydantic reports only ValueError
    return state


_StateInput = StateSettings | Literal["none"]
State = Annotated[StateSettings | None, BeforeValidator(_read_state, json_schema_input_type=_StateInput)]


class RecorderSettings(Settings):
    """Recording of requests, one JSON line each, in files that `gateway trace` reads.

    Parameters
    ----------
    path
        Folder of the files; created if missing.
    text
        How prompts and answers are recorded: not at all (`none`), as hashes that n-gram and suffix drafting can be
        replayed on (`hashes`), or as text (`full`).
    sample
        Share of requests to record, chosen at random.
    compression
        Compression of the files: `zstd` or `none`.
    flush_s
        Seconds between two writes; a killed process loses at most this much.
    rotate_mib
        Size in MiB at which the next file is started.
    rotate_s
        Age in seconds at which the next file is started.
    keep_s
        Seconds after its last write at which a file is deleted; null keeps all.
    keep_mib
        Total size in MiB beyond which the oldest files are deleted; null sets no limit.
    queue
        Most requests waiting to be written; further ones are counted as dropped and not recorded.
    queue_mib
        Most MiB of text waiting to be written.
    max_text_kib
        Longest text to record, in KiB: a longer request body or raw response is left out of the record.
    hash_salt
        Secret salt of the hashes. Null generates one at each start; hashes of different runs then cannot be compared.
    hash_ngram
        Number of consecutive tokens per hash.
    tokenizer
        The model's `tokenizer.json`, or its folder, to hash the model's tokens. Null hashes words, numbers and
        punctuation instead.
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
        The command line up to the model.
    model
        Name or path of the target model.
    flags
        The command line after the model.
    env
        Environment variables to add to those of the gateway.
    startup_timeout_s
        Seconds until the engine must pass its health check; then it is stopped and started again.
    """

    command: Annotated[list[Word], Field(min_length=1)] = ["vllm", "serve"]
    model: Annotated[str, Field(min_length=1)]
    flags: list[Word] = []
    env: dict[str, Word] = {}
    startup_timeout_s: Seconds = 900.0

    _reserved: ClassVar[Mapping[str, str]] = {
        "--host": "the gateway chooses the address",
        "--port": "the gateway chooses the port",
        "--uds": "the gateway chooses the address",
        "--speculative-config": "set speculative_config instead",
        "-sc": "set speculative_config instead",
        "--api-key": "set api_key instead",
    }

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue for each flag that the gateway sets itself."""
        flags = data.get("flags")
        for index, flag in enumerate(flags if isinstance(flags, list) else []):
            name = str(flag).split("=")[0].split(".")[0].replace("_", "-")
            if name in cls._reserved:
                yield Issue(("flags", index), f"{name} is set by the gateway", cls._reserved[name])


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
        Name of the calibration: the model and hardware whose step times and acceptance rates are simulated.
    seed
        Seed of the random acceptance of drafts.
    max_model_len
        Longest context, in tokens.
    time_scale
        Real seconds per simulated second: 0.1 runs ten times as fast.
    """

    calibration: Annotated[str, AfterValidator(_known_calibration)]
    seed: int = 0
    max_model_len: Annotated[int, Field(ge=2)] = 8192
    time_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class BackendSettings(Settings):
    """One replica: its speculation method, and exactly one of `url`, `serve` and `simulate`.

    Parameters
    ----------
    method
        How the replica speculates.
    url
        Address of a running replica: `http://host:port`, `https://host:port` or `unix:/path/to.sock`.
    serve
        A replica that the gateway starts.
    simulate
        A simulated replica.
    speculative_config
        The replica's `--speculative-config`, under vLLM's own keys.
    api_key
        Bearer token sent to the engine.
    weight
        Share of the requests relative to the other replicas, for policies that use weights.

    Examples
    --------
    >>> backend = BackendSettings(method="baseline", url="HTTP://10.0.0.1:8000/")
    >>> backend.url
    'http://10.0.0.1:8000'
    """

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [source]} for source in ("url", "serve", "simulate")]}
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
        """Yield an issue unless exactly one of `url`, `serve` and `simulate` is set, and those of the method."""
        sources = [source for source in ("url", "serve", "simulate") if data.get(source) is not None]
        if not sources:
            yield Issue((), "has none of url, serve and simulate", "set one of them")
        for source in sources[1:]:
            hint = "a backend has one of url, serve and simulate"
            yield Issue((source,), f"set together with {sources[0]}", hint, at_key=True)
        config = data.get("speculative_config")
        if data.get("method") in set(Method) and (config is None or isinstance(config, Mapping | SpeculativeConfig)):
            raw = config.model_dump(exclude_unset=True) if isinstance(config, SpeculativeConfig) else config
            for issue in method_issues(Method(data["method"]), raw, served="serve" in sources):
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
            issues = [issue.below("simulate") for issue in issues_of(error, ReplicaSettings)]
            raise error_of(type(self).__name__, issues) from None
        return self


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
        registered = policies()
        if data["name"] not in registered:
            raise error_of(cls.__name__, [Issue(("name",), "no such policy", did_you_mean(data["name"], registered))])
        model = registered[data["name"]].Settings
        try:
            settings = model.model_validate({key: value for key, value in data.items() if key != "name"})
        except ValidationError as error:
            raise error_of(cls.__name__, issues_of(error, model)) from None
        return {"name": data["name"], "settings": settings}

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


class ModelSettings(Settings):
    """One model: its replicas, and the policy that chooses among them.

    Parameters
    ----------
    aliases
        Further names that clients may use.
    policy
        Name of the policy, with the policy's own settings beside it.
    default_temperature
        Temperature that the engines take for requests without one. Needed only where the gateway cannot find it out: it
        reads the generation config of engines that it starts, and asks other engines once.
    backends
        The replicas by name.
    """

    aliases: list[Name] = []
    policy: PolicyReference
    default_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    backends: Annotated[dict[Name, BackendSettings], Field(min_length=1)]

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue for each backend that the policy names and the model lacks."""
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
        key if isinstance(key, Mapping | KeySettings | list) else {"name": f"key-{number}", "key": key}
        for number, key in enumerate(keys, 1)
    ]


class PoolSettings(Settings):
    """The pool file. Top-level keys that begin with `x-` are ignored, for use as YAML anchors.

    Parameters
    ----------
    models
        The models by the name that clients use.
    keys
        API keys of clients. A plain string is a key for all models, named `key-N` by its position in the list. Without
        keys the gateway accepts every request.
    recorder
        Recording of requests; null records nothing.
    state
        Store of learned statistics and rules; `none` keeps nothing.
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
    def _without_extension_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if not str(key).startswith("x-")}

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield conflicts between models, backends and keys."""
        yield from pool_issues(data)
