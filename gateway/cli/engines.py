"""What running engines say of themselves, for `gateway init` and `gateway check`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from backends import contradictions
from backends.backend import Backend
from backends.engine_metrics import EngineMetrics
from backends.probe import Probe, ProbeResult, as_json, misnamed
from backends.speculation import MODELLESS, Method, method_named
from backends.validation import Issue
from gateway.cli.columns import columns
from gateway.dialects.usage import Usage, first_usage

_TIMEOUT_S: Final = 2.0
_LONGEST_S: Final = 10.0
_SAMPLE_S: Final = 60.0
"""Seconds for the few tokens that are asked for: the first answer of an engine may take ten."""
_SAMPLE: Final = {"prompt": "Hi", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
_TOLD = (
    *("model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
    *("prompt_lookup_min", "prompt_lookup_max", "parallel_drafting"),
)
_HEAD = ("engine", "vLLM", "speculation", "context", "prefix cache", "usage", "acceptance")


@dataclass(slots=True)
class Engine:
    """What the engine of a backend says of itself."""

    backend: Backend
    result: ProbeResult = field(default_factory=ProbeResult)
    names: tuple[str, ...] = ()  # by which it serves its model
    version: str = ""  # of its vLLM
    context_tokens: int = 0
    told: Mapping[str, Any] = field(default_factory=dict)  # its `speculative_config`, in development mode
    usage: Usage | None = None  # at the end of a stream

    @property
    def metrics(self) -> EngineMetrics:
        """Its metrics; those of an engine at rest if it has none."""
        return self.result.engine or EngineMetrics()

    @property
    def method(self) -> Method | None:
        """How it speculates, as far as it tells."""
        if not self.metrics.speculates:
            return Method.BASELINE
        return method_named(str(self.told["method"])) if "method" in self.told else None

    def speculation(self) -> dict[str, Any]:
        """Return the keys of a backend that say how it speculates."""
        if self.method is Method.BASELINE:
            return {"method": Method.BASELINE.value}
        method, metrics = self.method or Method.CUSTOM_CLASS, self.metrics
        drafted = math.ceil(metrics.draft_tokens / metrics.drafts) if metrics.drafts else 1
        config = {"num_speculative_tokens": len(metrics.accepted_per_position) or drafted}
        config |= {key: self.told[key] for key in _TOLD if self.told.get(key)}
        if method in MODELLESS:
            config.pop("model", None)
        return {"method": method.value, "speculative_config": config}

    def notes(self) -> Iterator[str]:
        """Yield what its operator may have to do."""
        metrics = self.metrics
        if metrics.speculates is None:
            yield "it does not say whether it speculates: set method and speculative_config if it does"
        elif self.method is None:
            share = f" in {metrics.drafts / metrics.steps:.0%} of its steps" if metrics.drafts and metrics.steps else ""
            yield (
                f"it drafts{share}, but says how only with VLLM_SERVER_DEV_MODE=1: set method and speculative_config "
                "(ngram and suffix draft in some steps, all others in each)"
            )
        if self.usage is None:
            yield "its streams end without usage: tokens are estimated, and acceptance is not learned from them"
        elif self.usage.accepted_tokens is None and metrics.speculates:
            yield "its answers do not say what was accepted: start it with --per-request-spec-decode-metrics summary"

    def cells(self) -> tuple[str, ...]:
        """Return its row of the table."""
        metrics, usage, k = self.metrics, self.usage, self.speculation().get("speculative_config", {})
        drafts = f"{self.method or 'unnamed'}, k {k['num_speculative_tokens']}" if k else "none"
        accepted = "no" if usage is None or usage.accepted_tokens is None else "yes"
        return (
            self.version or "?",
            "?" if metrics.speculates is None else drafts,
            f"{self.context_tokens:,}" if self.context_tokens else "?",
            "?" if metrics.prefix_caching is None else "yes" if metrics.prefix_caching else "no",
            "no" if usage is None else "yes",
            accepted if metrics.speculates else "-",
        )


def ask(backends: Sequence[Backend], *, fully: bool) -> list[Engine]:
    """Ask the engines of some backends; fully for all of it, with a request for a few tokens to each."""

    async def all_at_once() -> list[Engine]:
        return await asyncio.gather(*(_ask(Engine(each), fully=fully) for each in backends))

    return asyncio.run(all_at_once())


def table(engines: Sequence[Engine]) -> list[str]:
    """Return a line for each engine, and their head."""
    names = ["engine", *(each.backend.name for each in engines)]
    width = max(map(len, names))
    answered = [each for each in engines if each.result.problem is None]
    rows = [_HEAD, *((each.backend.name.ljust(width), *each.cells()) for each in answered)]
    lines = iter(columns([(row[0].ljust(width), *row[1:]) for row in rows], left=3))
    head = [next(lines)] if answered else []
    return head + [
        f"{e.backend.name:{width}}  {e.result.problem}" if e.result.problem else next(lines) for e in engines
    ]


def differences(engines: Sequence[Engine], aliases: Mapping[str, Sequence[str]], *, fully: bool) -> Iterator[Issue]:
    """Yield what is not as the pool file says; that an engine does not run only if it was asked fully."""
    for model, others in aliases.items():
        members = [each for each in engines if each.backend.model == model]
        if wrong := misnamed(model, [each.result.serves for each in members]):
            yield Issue(("models", model), wrong, at_key=True)
        for engine in members:
            is_said = (wrong and engine.result.serves) or (engine.result.refused and not fully)
            if engine.result.problem is not None and not is_said:
                yield Issue(("url",), engine.result.problem).below("models", model, "backends", engine.backend.name)
            for issue in _differences(engine):
                yield issue.below("models", model, "backends", engine.backend.name)
        for index, alias in enumerate(others):
            if lacking := [each.backend.name for each in members if each.names and alias not in each.names]:
                hint = f"start it with --served-model-name {model} {alias}"
                yield Issue(("models", model, "aliases", index), f"not served by {', '.join(lacking)}", hint)
        if fully and (note := unlike(members)):
            yield Issue(("models", model), note, at_key=True)


def unlike(engines: Sequence[Engine]) -> str:
    """Return that some engines of a model take requests that others refuse; empty if none does."""
    lengths = {each.context_tokens for each in engines if each.context_tokens}
    if len(lengths) < 2:
        return ""
    return f"its engines serve {min(lengths):,} to {max(lengths):,} tokens: give them one --max-model-len"


def _differences(engine: Engine) -> Iterator[Issue]:
    """Yield how an engine speculates otherwise than the pool file says."""
    backend = engine.backend
    for kind, what in backend.contradictions.items():
        path = ("speculative_config", "num_speculative_tokens") if kind == "k" else ("method",)
        yield Issue(path, f"the pool file says {backend.said}, but {what}")
    if backend.contradictions or not engine.told:
        return
    if engine.method not in {backend.said.method, None}:
        yield Issue(("method",), f"the pool file says {backend.said.method}, but its engine {engine.method}")
    for key, value in engine.speculation().get("speculative_config", {}).items():
        said = backend.speculative_config.get(key, value)
        if said != value:
            yield Issue(("speculative_config", key), f"the pool file says {said}, but its engine {value}")


async def _ask(engine: Engine, *, fully: bool) -> Engine:
    backend = engine.backend
    probe = Probe(backend, _TIMEOUT_S)
    try:
        async with asyncio.timeout(_LONGEST_S):
            engine.result = await probe.run(admit=True)
            if fully and engine.result.problem is None:
                await probe.ask_version()
                info = as_json(await probe.request("GET", "/server_info?config_format=json"))
                match info:
                    case {"vllm_config": {"speculative_config": dict(told)}}:
                        engine.told = told
        if fully and engine.result.problem is None:
            probe.set_timeout(_SAMPLE_S)
            answer = await probe.request("POST", "/v1/completions", {"model": probe.model, **_SAMPLE})
            engine.usage = first_usage(as_json(line[5:]) for line in answer.splitlines() if line.startswith(b"data:"))
    except TimeoutError:
        engine.result = ProbeResult("does not answer in time")
    finally:
        await probe.close()
    engine.names, engine.version, engine.context_tokens = probe.served, probe.version, probe.context_tokens
    backend.set_engine(probe.context_tokens, probe.version)
    if engine.result.engine is not None and backend.model:
        contradictions.compare(backend, engine.result.engine)
    return engine
