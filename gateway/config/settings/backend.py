"""One backend of a model: a running replica, one to start, or a simulated one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from backends.drafter_limit import Beyond
from backends.speculation import MODELLESS, Method, SpeculativeConfig, method_issues, serve_config
from backends.validation import Issue, error_of, issues_of
from gateway.config.settings.base import Seconds, Secret, Settings, Word
from gateway.config.urls import address

_RANGE = r"^\d{1,9}-\d{1,9}$"
_EVENTS = r"^(tcp://[^*/\s]+:\d{1,5}|ipc:///\S+)$"


def _checked_range(text: str) -> str:
    least, _, most = text.partition("-")
    if int(least) > int(most):
        raise ValueError("expected the least tokens first, such as 0-4096")
    return text


def issues_of_method(data: Mapping[str, Any], *, served: bool) -> Iterator[Issue]:
    """Yield what is wrong with `speculative_config` and other keys, given the `method`."""
    config, method = data.get("speculative_config"), data.get("method")
    if not isinstance(method, str):
        return  # an error of its own
    if method in MODELLESS and data.get("drafter_limit") is not None:
        what = f"{method} has no draft model, so its drafts have no limit"
        yield Issue(("drafter_limit",), what, "remove it", at_key=True)
    if method == Method.BASELINE and data.get("draft_depth"):
        yield Issue(("draft_depth",), "a baseline drafts nothing", "remove it", at_key=True)
    if method in set(Method) and (config is None or isinstance(config, Mapping | SpeculativeConfig)):
        raw = config.model_dump(exclude_unset=True) if isinstance(config, SpeculativeConfig) else config
        for issue in method_issues(Method(method), raw, served=served):
            yield issue.below("speculative_config")


class DrafterLimitSettings(Settings):
    """The longest context that a drafter serves, and what the engine does with requests beyond it.

    Parameters
    ----------
    tokens
        Tokens of prompt and answer together: the `max_position_embeddings` of the draft's `config.json`. A number alone
        is short for this. At or above the `--max-model-len` of the engine it is no limit.
    beyond
        `worse`: drafts of the request are accepted less and less; `none`: it alone gets no drafts; `batch`: while it
        runs, no request of its batch gets any; `crash`: the engine ends. Null: what the engine's version of vLLM does.
    """

    tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    beyond: Beyond | None = None

    @model_validator(mode="before")
    @classmethod
    def _tokens_alone(cls, data: Any) -> Any:
        return data if isinstance(data, Mapping | DrafterLimitSettings) else {"tokens": data}


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
        Seconds in which the engine must pass its health check; otherwise it is restarted.
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
    from backends.calibration.load import load_calibration

    return load_calibration(name).name


class SimulateSettings(Settings):
    """A replica of the built-in simulator.

    Parameters
    ----------
    calibration
        The model and hardware whose step times and acceptance are simulated: a calibration of the package by name, or
        the path of a YAML file, relative to the pool file.
    seed
        Seed of the random acceptance of drafts.
    max_model_len
        Longest context, in tokens; null: the calibration's.
    time_scale
        Real seconds per simulated second: 0.1 runs ten times as fast.
    """

    calibration: Annotated[str, AfterValidator(_known_calibration)]
    seed: int = 0
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    time_scale: Annotated[float, Field(gt=0)] = 1.0


class BackendSettings(Settings):
    """One replica: its speculation method, and exactly one of `url`, `serve` and `simulate`.

    Parameters
    ----------
    method
        How the replica speculates; by default as `speculative_config` says, or else `baseline`.
    url
        Address of a running replica: `http://host:port`, `https://host:port` or `unix:/path/to.sock`.
    serve
        An engine that the gateway starts: `command model flags...`, with `--port` and `--speculative-config` added.
    simulate
        A replica of the built-in simulator.
    speculative_config
        The replica's `--speculative-config`, under vLLM's own keys.
    drafter_limit
        The longest context that its drafter serves, or a mapping: docs/configuration.md. Null: what the draft says, if
        it is in a local folder.
    draft_depth
        Whether its engine has the scheduler of deploy/vllm_draft_depth, and so drafts as deep as each request asks.
        With `serve` the gateway starts it with that scheduler.
    kv_events
        Where its engine publishes what its KV cache stores and evicts: the `endpoint` of its
        `--kv-events-config`.
    api_key
        Bearer token sent to the engine.
    weight
        Share of the requests relative to the other replicas, for policies that use weights.
    context_range
        Tokens of the prompts that it is meant for. Others come only if no other is nearer.

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
    drafter_limit: DrafterLimitSettings | None = None
    draft_depth: bool = False
    kv_events: Annotated[str, Field(pattern=_EVENTS)] | None = None
    api_key: Secret = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    context_range: Annotated[str, Field(pattern=_RANGE), AfterValidator(_checked_range)] | None = None

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue unless exactly one of `url`, `serve` and `simulate` is set, and those of the method."""
        sources = [source for source in ("url", "serve", "simulate") if data.get(source) is not None]
        if not sources:
            yield Issue((), "has none of url, serve and simulate", "set one of them")
        for source in sources[1:]:
            hint = "a backend has one of url, serve and simulate"
            yield Issue((source,), f"set together with {sources[0]}", hint, at_key=True)
        yield from issues_of_method(data, served="serve" in sources)

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
