"""Output at startup: the pool, and how to send a request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from backends.backend import Backend
from backends.contradictions import unlike_answers
from backends.draft_schedule import draft_tokens
from backends.files.draft_config import context_note
from backends.speculation import MODELLESS, Method, release_notes, serve_config
from gateway.config.settings import BackendSettings, DiscoverSettings, ModelSettings, PoolSettings
from gateway.gateway import rooms
from gateway.service.replicas import configured


def pool_lines(settings: PoolSettings) -> Iterator[str]:
    """Yield the replicas of each model: name, method, most tokens drafted per step (k), weight and location."""
    backends = configured(settings)
    for model, model_settings in settings.models.items():
        rows = [("backend", "method", "k", "weight", "where")]
        for name, backend in model_settings.backends.items():
            k = draft_tokens(backend.method, serve_config(backend.method, backend.speculative_config))
            rows.append((name, _method(backend), str(k or ""), f"{backend.weight:g}", location(backend)))
        for name, source in model_settings.discover.items():
            method = None if source.inference_pool is not None else source.method
            k = draft_tokens(method, serve_config(method, source.speculative_config)) if method else 0
            found = f"found by {_kind(source)}"
            shown = method.value if method else "by label"
            rows.append((f"{name}/...", shown, str(k or ""), f"{source.weight:g}", found))
        weighs = any(row[3] != "1" for row in rows[1:])
        names, methods = (max(len(row[column]) for row in rows) for column in (0, 1))
        yield f"{model}, by {model_settings.policy.name}:"
        for name, shown, tokens, weight, where in rows:
            # The location comes last: it may be wider than the screen.
            yield f"  {name:{names}}  {shown:{methods}} {tokens:>3}  {f'{weight:>6}  ' if weighs else ''}{where}"
        members = [each for each in backends if each.model == model]
        for note in filter(None, (_alike(model_settings), *unlike_answers(members))):
            yield f"  {note}"


def _alike(model: ModelSettings) -> str:
    """Return a note that `learned` has no methods to choose between if all replicas speculate alike; else ""."""
    ways = {(each.method, str(each.speculative_config)) for each in model.backends.values()}
    if model.policy.name != "learned" or model.discover or len(model.backends) < 2 or len(ways) > 1:
        return ""
    (method, _), *_ = ways
    return (
        f"All {len(model.backends)} speculate alike ({method}): `learned` balances their load and caches; choosing "
        "how a request is drafted for needs replicas that differ."
    )


def limit_lines(backends: Sequence[Backend]) -> Iterator[str]:
    """Yield the longest context of each replica's drafter, what happens beyond it, and what vLLM drops."""
    for each in backends:
        name, limit = f"{each.model}/{each.name}", each.drafter_limit
        if limit is not None:
            yield f"{name}: its drafter serves {limit.tokens:,} tokens; beyond, {limit.consequence}."
        elif each.declared_limit is None and not each.simulated and each.method not in MODELLESS | {Method.MTP}:
            yield f"{name}: how long a context its drafter serves is not known: set drafter_limit."
        if not each.simulated:
            how = each.method, each.speculative_config, each.engine.said.version
            tokens = None if each.declared_limit is None else each.declared_limit.tokens
            for note in (*release_notes(*how), *context_note(*how, tokens)):
                yield f"{name}: {note}."


def location(backend: BackendSettings) -> str:
    """Return the address of a replica, or how it is started; always mark simulated replicas."""
    if backend.simulate is not None:
        return f"simulated ({backend.simulate.calibration})"
    if backend.serve is not None:
        return f"started here ({backend.serve.model})"
    return backend.url or ""


def _kind(source: DiscoverSettings) -> str:
    if source.kubernetes is not None:
        return f"Kubernetes ({source.kubernetes.service})"
    if source.inference_pool is not None:
        return f"InferencePool ({source.inference_pool.name})"
    return f"DNS ({source.dns or source.srv})"


def start_lines(settings: PoolSettings, addresses: Sequence[str], generated_admin_key: str | None = None) -> list[str]:
    """Return the lines to print once the gateway listens: for clients, `/admin` and what rooms serve."""
    address, *others = addresses
    scheme = settings.server.scheme
    url = f"{scheme}://{address}"
    lines = [f"Listening at {url}  (OpenAI base_url: {url}/v1)"]
    kinds, key = rooms(), f"#key={generated_admin_key}" if generated_admin_key else ""
    beside = [found for room in reversed(kinds) if (found := room.beside(settings)) is not None]
    told = [each.line.format(others.pop()) for each in beside]
    pages = [room.page for room in kinds if room.page is not None and room.shows_page(settings)]
    lines += [f"{page.title} at {scheme}://{[address, *others][-1]}{page.path}{key}" for page in pages]
    lines += [*(f"/admin is at {scheme}://{other} only." for other in others), *told]
    simulated = [b for model in settings.models.values() for b in model.backends.values() if b.simulate is not None]
    if simulated:
        what = "replica is" if len(simulated) == 1 else "replicas are"
        lines.append(
            f"{len(simulated)} {what} simulated: answers are made up, with the timing of published measurements."
        )
    if not settings.keys:
        lines.append("Open: no keys are set, so anyone who can reach this address can use it.")
    if generated_admin_key is not None:
        lines.append(admin_key_line(generated_admin_key))
    return lines


def admin_key_line(generated: str) -> str:
    """Return the line that shows a generated admin key."""
    return f"Admin key of this run: {generated}"


def try_line(settings: PoolSettings, url: str) -> str:
    """Return a shell command that streams a chat request to the first model."""
    model = next(iter(settings.models))
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    key = " -H 'Authorization: Bearer YOUR-KEY'" if settings.keys else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    )


def _method(backend: BackendSettings) -> str:
    config = backend.speculative_config
    is_parallel = backend.method is Method.DRAFT_MODEL and config is not None and config.parallel_drafting
    return f"{backend.method} (parallel)" if is_parallel else backend.method.value
