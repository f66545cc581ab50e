"""What running engines report about themselves, for `gateway init` and `gateway check`."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from backends import contradictions
from backends.backend import Backend
from backends.engine import SEVERAL, Said
from backends.engine_metrics import EngineMetrics
from backends.files.draft_config import context_note, longest_drafted
from backends.probe import Probe, ProbeResult, as_json, misnamed
from backends.reported import printable
from backends.speculation import MODELLESS, Method, SpeculativeConfig, method_named, release_notes
from backends.validation import Issue
from gateway.cli.columns import columns
from gateway.cli.mistaken import mistaken
from gateway.cli.output import say
from gateway.dialects.usage import Usage, first_usage

_TIMEOUT_S: Final = 2.0
_LONGEST_S: Final = 10.0
_SLOW_S: Final = 60.0
"""For a few tokens, or all of its configuration: an engine's first answer may take ten."""
_POLL_S: Final = 2.0
_SAMPLE: Final = {"prompt": "Hi", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
_LEAST_STEPS: Final = 200
_ALL, _MANY = 0.995, 0.9
"""Shares of steps with a draft: from the first on, an engine drafts in every step; below the second, it does not."""
_LOADING = 503
_BESIDE: Final = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
_KEYS = tuple(SpeculativeConfig.model_fields)
_HEAD = ("engine", "vLLM", "speculation", "context", "prefix cache", "usage", "acceptance")


@dataclass(slots=True)
class Engine:
    """What the engine of a backend reports about itself."""

    backend: Backend
    result: ProbeResult = field(default_factory=ProbeResult)
    said: Said = field(default_factory=Said)  # names, version and context
    is_several: bool = False  # whether several engines answer at its address
    told: Mapping[str, Any] = field(default_factory=dict)  # its `speculative_config`, in development mode
    usage: Usage | None = None  # at the end of a stream

    @property
    def metrics(self) -> EngineMetrics:
        """Its metrics; those of an idle engine if it has none."""
        return self.result.engine or EngineMetrics()

    @property
    def is_loading(self) -> bool:
        """Whether it may be an engine that is still loading."""
        return self.result.refused or self.result.late or self.result.status == _LOADING

    @property
    def speculates(self) -> bool | None:
        """Whether it speculates; None if it says nothing of it, as with --disable-log-stats."""
        return True if self.told else self.metrics.speculates

    @property
    def method(self) -> Method | None:
        """Its method, if it reports one."""
        if not self.speculates:
            return Method.BASELINE
        return method_named(str(self.told.get("method", "")))

    def config(self) -> dict[str, Any]:
        """Return the part of its `speculative_config` that it reports; empty for a baseline."""
        if not self.speculates:
            return {}
        drafted = math.ceil(self.metrics.draft_tokens / max(1, self.metrics.drafts))
        config = {"num_speculative_tokens": len(self.metrics.accepted_per_position) or max(1, drafted)}
        left_out = {"method", *(name for name in _KEYS if name.startswith("suffix"))}
        left_out |= {"model"} if self.method in MODELLESS else set()
        return config | {key: self.told[key] for key in _KEYS if key not in left_out and self.told.get(key)}

    def notes(self) -> Iterator[str]:
        """Yield what its operator should know about it, or may have to do."""
        metrics, usage = self.metrics, self.usage
        if self.is_several:
            yield SEVERAL
        context = f"{self._context()} tokens of context"
        cache = {None: "not told", 0: "off"}.get(metrics.prefix_caching, "on")
        yield f"vLLM {self.said.version or '(its version is not told)'}, {context}, prefix cache {cache}"
        if self.speculates is None:
            yield "it does not say whether it speculates: set method and speculative_config if it does"
        elif self.method is None:
            yield (
                f"it drafts{self._drafting()}, but says how only with VLLM_SERVER_DEV_MODE=1: set method and "
                "speculative_config"
            )
        if self.method is not None:
            yield from release_notes(self.method, self.told, self.said.version)
            yield from context_note(self.method, self.told, self.said.version, longest_drafted(self.method, self.told))
        if usage is None:
            yield "its streams end without usage: tokens are estimated, and acceptance is not learned from them"
        elif self.speculates and usage.accepted_tokens is None:
            yield "its answers do not say what was accepted: start it with --per-request-spec-decode-metrics summary"

    def _context(self) -> str:
        return f"{self.said.context_tokens:,}" if self.said.context_tokens else "?"

    def _drafting(self) -> str:
        """Return the share of its steps in which it drafts, and which methods do that; empty after too few steps."""
        metrics = self.metrics
        steps = metrics.later_steps or 0
        if steps < _LEAST_STEPS:
            return ""
        share = min(1.0, metrics.drafts / steps)
        told = ", as a draft model, EAGLE and MTP do" if share >= _ALL else ", as ngram and suffix do"
        return f" in {share:.0%} of its steps{told if share >= _ALL or share < _MANY else ''}"

    def beside(self) -> str:
        """Return the command for an engine of the same model that speculates differently."""
        card, names = self.said.card or {}, " ".join(map(shlex.quote, self.said.served))
        command = f"vllm serve {shlex.quote(str(card.get('root') or self.said.served[0]))} --served-model-name {names}"
        how = "" if self.speculates else f" --speculative-config {shlex.quote(_BESIDE)}"
        return f"{command} --port 8001{how}"

    def cells(self) -> Iterator[str]:
        """Yield its row of the table."""
        metrics, config = self.metrics, self.config()
        yield from (self.backend.name, self.said.version or "?")
        how = f"{self.method or 'unnamed'}, k {config['num_speculative_tokens']}" if config else "none"
        yield from ("?" if self.speculates is None else how, self._context())
        yield {None: "?", 0: "no"}.get(metrics.prefix_caching, "yes")
        yield "no" if self.usage is None else "yes"
        yield "-" if not config else "no" if self.usage is None or self.usage.accepted_tokens is None else "yes"


def ask(backends: Sequence[Backend], *, fully: bool) -> list[Engine]:
    """Query the engines of some backends; `fully` includes a request for a few tokens to each."""

    async def all_at_once() -> list[Engine]:
        return await asyncio.gather(*(_ask(each, fully=fully) for each in backends))

    return asyncio.run(all_at_once())


def wait_for(backends: Sequence[Backend], most_s: float) -> None:
    """Wait until no engine is still loading, at most `most_s`; print which ones it waits for."""
    end_s, told = time.monotonic() + most_s, ""
    while loading := [each for each in ask(backends, fully=False) if each.is_loading]:
        waiting = "; ".join(f"{each.backend.url}: {each.result.problem}" for each in loading)
        if waiting != told:
            say(f"Waiting for {waiting} (at most {most_s:.0f} s in all)", err=True)
        told = waiting
        if time.monotonic() > end_s:
            return
        time.sleep(_POLL_S)


def table(engines: Sequence[Engine], places: Mapping[str, str] | None = None) -> list[str]:
    """Return a table of the engines that answered, and a line for each other one; `places` says where URLs are from."""
    rows = [tuple(each.cells()) for each in engines if each.result.problem is None]
    lines = columns([_HEAD, *rows], left=3) if rows else []
    for each in engines:
        if each.result.problem is not None:
            place = "" if places is None else places[each.backend.url]
            lines.append(f"{each.backend.name}{place and f' ({place})'}: {each.result.problem}")
    return lines


def differences(engines: Sequence[Engine], aliases: Mapping[str, Sequence[str]], *, fully: bool) -> Iterator[Issue]:
    """Yield how engines differ from the pool file; that one does not run, only after a full query."""
    for model, others in aliases.items():
        members = [each for each in engines if each.backend.model == model]
        of_all = [misnamed(model, [each.result.serves for each in members])]
        of_all += [unlike(members), contradictions.unlike_weights([each.backend for each in members])] if fully else []
        yield from (Issue(("models", model), wrong, at_key=True) for wrong in of_all if wrong)
        for engine in members:
            is_said = (of_all[0] and engine.result.serves) or (engine.result.refused and not fully)
            for issue in _differences(engine, is_said=bool(is_said)):
                yield issue.below("models", model, "backends", engine.backend.name)
        for index, alias in enumerate(others):
            if lacking := [each.backend.name for each in members if each.said.served and alias not in each.said.served]:
                hint = f"start it with --served-model-name {model} {alias}"
                yield Issue(("models", model, "aliases", index), f"not served by {', '.join(lacking)}", hint)


def unlike(engines: Sequence[Engine]) -> str:
    """Return that some engines of a model accept requests that others reject; empty if none does."""
    lengths = {each.said.context_tokens for each in engines} - {0}
    if len(lengths) < 2:
        return ""
    return f"its engines serve {min(lengths):,} to {max(lengths):,} tokens: give them one --max-model-len"


def _differences(engine: Engine, *, is_said: bool) -> Iterator[Issue]:
    """Yield how an engine differs from the pool file, unless that is reported for its model."""
    backend, where = engine.backend, ("speculative_config", "num_speculative_tokens")
    if engine.result.problem is not None and not is_said:
        yield Issue(("url",), engine.result.problem)
    if engine.is_several:
        yield Issue(("url",), SEVERAL)
    for kind, what in backend.engine.contradictions.items():
        yield Issue(where if kind == "k" else ("method",), f"the pool file says {backend.declared}, but {what}")
    if engine.told and not backend.engine.contradictions:
        if engine.method not in {backend.declared.method, None}:
            yield Issue(("method",), f"the pool file says {backend.declared.method}, but its engine {engine.method}")
        for key, value in engine.config().items():
            if (said := backend.speculative_config.get(key, value)) != value:
                yield Issue(("speculative_config", key), f"the pool file says {said}, but its engine {value}")


async def _ask(backend: Backend, *, fully: bool) -> Engine:
    probe = Probe(backend, _TIMEOUT_S)
    engine = Engine(backend)
    try:
        async with asyncio.timeout(_LONGEST_S):
            engine.result = await probe.run(admit=True)
        if fully and (wrong := await mistaken(backend.url, engine.result)):
            engine.result = ProbeResult(wrong, is_certain=True)
        engine.said = engine.result.said or Said()
        if fully and engine.result.problem is None:
            engine.said = replace(engine.said, version=await probe.version())
            engine.is_several = await probe.meets_several()
            probe.set_timeout(_SLOW_S)
            match as_json(await probe.request("GET", "/server_info?config_format=json")):
                case {"vllm_config": {"speculative_config": dict(told)}}:
                    engine.told = {
                        key: printable(each) if isinstance(each, str) else each for key, each in told.items()
                    }
            began_s = time.monotonic()
            answer = await probe.request("POST", "/v1/completions", {"model": probe.model, **_SAMPLE})
            if not answer and time.monotonic() - began_s >= _SLOW_S:
                engine.result = ProbeResult(f"does not answer a request for four tokens within {_SLOW_S:g} s")
            events = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")]
            engine.usage = first_usage(map(as_json, reversed(events)))  # it may tell tokens with each event
    except TimeoutError:
        engine.result = ProbeResult("does not answer in time")
    finally:
        await probe.close()
    backend.set_engine(engine.said)
    if engine.result.engine is not None and backend.model:
        contradictions.compare(backend, engine.result.engine)
    return engine
