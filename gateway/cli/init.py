"""`gateway init`: writes a first pool file for running engines, or for simulated replicas."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import typer

from backends.validation import UsageError
from gateway.cli.given import read_given
from gateway.cli.output import say

if TYPE_CHECKING:
    from gateway.cli.addresses import Addresses
    from gateway.cli.engines import Engine

_LOCKED = {401, 403}
_SUFFIXES = {".yaml", ".yml", ".json", ".conf", ".cfg", ".toml", ".sh", ".env", ".txt"}
_MOST_BYTES, _MOST_ADDRESSES = 1 << 20, 256
_FOR_EDITORS = "# yaml-language-server: $schema=pool.schema.json\n#\n"
Place: TypeAlias = tuple[str | int, ...]
_WAIT_S = 600.0
_HEAD = "Written by `gateway init` of what the engines said. A line like this one is to be read, or to be acted on."


def init(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL|FILE",
            help="Engines that run, as http://10.0.0.1:8000, or a file that names them, such as another router's.",
            show_default=False,
        ),
    ] = None,
    *,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Key of the engines, which the file refers to.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every URL that is given answers.")] = False,
    wait_s: Annotated[float, typer.Option(metavar="S", min=0, help="Most seconds that --wait waits.")] = _WAIT_S,
) -> None:
    """Write a pool file for running engines; without any, one of simulated replicas.

    Each engine is asked for its model and how it speculates, and gets one request for four tokens. In a file, or in
    another router's flags after `--`, every host with a port is asked, and the engines among them are used. Exits 2 if
    no engine answers, or the pool file exists.

    \b
    gateway init
    gateway init http://10.0.0.1:8000 http://10.0.0.2:8000 --wait
    gateway init litellm.yaml
    gateway init -- --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000
    nginx -T | gateway init -
    """
    path: Path = config or context.obj
    if os.path.exists(path):
        raise UsageError(f"cannot write {path}: it exists; give another name with --config")
    if sources:
        text, summary = _of_engines(sources, api_key, wait_s if wait else None)
    else:
        text = files("gateway.config").joinpath("pool.yaml").read_text("utf-8").removeprefix(_FOR_EDITORS)
        summary = "five simulated replicas"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = ": ".join(filter(None, (error.filename, error.strerror)))
        raise UsageError(f"cannot write {path}: {reason}; give another name with --config") from None
    say(f"Wrote {path}: {summary}. Serve them with `gateway --config {path}`.")


def _of_engines(sources: list[str], api_key: str | None, wait_s: float | None) -> tuple[str, str]:
    """Return a pool file of the engines that some sources name, and a summary of it."""
    from pydantic import SecretStr

    from backends.backend import Backend
    from backends.speculation import Method
    from gateway.cli.engines import ask, table, wait_for
    from gateway.config.pool_text import Variable, check_text, pool_text
    from gateway.config.settings.base import checked_secret
    from gateway.config.short_forms import name_of

    try:
        checked_secret(SecretStr(api_key or ""))
    except ValueError as error:
        raise UsageError(f"--api-key or VLLM_API_KEY {error}: give the key alone") from None
    named = _named(sources)
    keys = {url: api_key for url, place in named.places.items() if not place or (api_key and _is_private(url))}
    asked = [Backend(name_of(url), "", Method.BASELINE, url, api_key=keys.get(url)) for url in named.places]
    for where, variable in named.unset.items():
        say(f"{where}: an address hangs on {variable}, which is not set here", err=True)
    if wait_s is not None:
        wait_for([each for each in asked if not named.places[each.url]], wait_s)
    engines = ask(asked, fully=True)
    say("\n".join(table(engines, named.places)))
    silent = [each for each in engines if each.result.problem is not None]
    hint = "".join(_hints(silent, wait_s))
    if len(silent) == len(engines):
        raise UsageError(f"none of these can be used{hint}")
    key = Variable("${VLLM_API_KEY}") if api_key else None
    heard = [each for each in engines if each not in silent]
    models, notes = _models(heard, key)
    place = ("models", *models, "backends") if len(models) == 1 else ("models",)
    for each in silent:
        where = named.places[each.backend.url]
        notes.append((place, f"Left out{where and f' ({where})'}: {each.result.problem}. If this is an engine:"))
        notes.append((place, f"  {each.backend.name}: {{url: {each.backend.url}}}"))
    taken = {*models, *(alias for model in models.values() for alias in model.get("aliases", ()))}
    others = {f"model_name {name}": where for name, where in named.names.items() if name not in taken} | named.settings
    if others:
        kept = ", ".join(f"{name} ({where})" for name, where in others.items())
        advice = "Clients' names of a model are its aliases; keys, limits, weights and timeouts: docs/configuration.md."
        notes.append(((), f"Not taken over: {kept}. {advice}"))
    choice = [*_choice(models, heard)]
    notes += [(("models",), line) for line in choice]
    keyed = {"keys": [{"name": "engines", "key": key}]} if key else {}
    settings = {"server": {"host": "127.0.0.1", "port": 8080}, **keyed, "models": models}
    text = pool_text(settings, notes, [_HEAD])
    check_text(text)
    if silent:
        say(f"Left out, as comments: {', '.join(each.backend.url for each in silent)}{hint}", err=True)
    if others:
        say(f"Not taken over, and named in a comment: {', '.join(others)}", err=True)
    for line in choice:
        say(line, err=True)
    if key:
        say("Set VLLM_API_KEY before you serve it: the key of the engines, which clients need too.", err=True)
    return text, ", ".join(f"{len(model['backends'])} x {name}" for name, model in models.items())


def _hints(silent: list[Engine], wait_s: float | None) -> Iterator[str]:
    """Yield hints on engines that cannot be used."""
    locked = [each for each in silent if each.result.status in _LOCKED]
    if any(each.backend.api_key for each in locked):
        yield "; the key is not accepted: give that of the engines with --api-key or VLLM_API_KEY"
    elif locked:
        yield "; engines with a key need --api-key or VLLM_API_KEY"
    if any(each.is_loading for each in silent):
        yield "; is it still loading? --wait waits" if wait_s is None else f"; not there after {wait_s:.0f} s"


def _choice(models: Mapping[str, Any], engines: list[Engine]) -> Iterator[str]:
    """Yield advice on pools that leave nothing to choose between."""
    pools = "; ".join(f"{name}: {', '.join(model['backends'])}" for name, model in models.items())
    if len(models) > 1:
        yield (
            f"These engines serve {len(models)} models, each a pool of its own: {pools}. A request for one never goes "
            "to another. If they are one model, start all with the same --served-model-name, and run this again."
        )
    elif len(engines) == 1:
        yield f"There is nothing to choose between: {pools} is one engine. Start another on a GPU of its own:"
        yield f"  {engines[0].beside()}"


def _models(engines: list[Engine], key: str | None) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """Return the models of engines that answered, and notes at their places."""
    from gateway.cli.engines import unlike

    members: dict[str, list[Engine]] = {}
    models, notes = dict[str, Any](), list[tuple[Place, str]]()
    for engine in engines:
        names = engine.said.served
        members.setdefault(next((name for name in members if name in names), names[0]), []).append(engine)
    for name, served in members.items():
        common = set.intersection(*(set(each.said.served) for each in served)) - {name}
        models[name] = {"aliases": sorted(common)} if common else {}
        models[name] |= {"policy": {"name": "learned"}, "backends": {}}
        notes += [(("models", name), unlike(served))] if unlike(served) else []
        for each in served:
            how = {"method": str(each.method or "custom_class"), "speculative_config": each.config()}
            settings = {"url": each.backend.url, "api_key": key if each.backend.api_key else None, **how}
            models[name]["backends"][each.backend.name] = {k: value for k, value in settings.items() if value}
            notes += [(("models", name, "backends", each.backend.name), note) for note in each.notes()]
    return models, notes


def _named(sources: list[str]) -> Addresses:
    """Return the given addresses, which have no place, and those found in files or in another router's flags."""
    from gateway.cli.addresses import Addresses

    named = Addresses()
    if any(each.startswith("--") for each in sources):
        named.search(" ".join(sources), "the flags")
        sources = []
    for each in sources:
        if each == "-" or ("://" not in each and (os.path.exists(each) or Path(each).suffix in _SUFFIXES)):
            named.search(read_given(each, _MOST_BYTES).decode(errors="replace"), Path(each).name)
        else:
            named.places.setdefault(_address(each), "")
    for url in list(named.places):
        for number in ("127.0.0.1", "[::1]"):
            same = url.replace("//localhost:", f"//{number}:", 1)
            if same != url and same in named.places:
                say(f"{url} and {same} are one engine, which is taken once", err=True)
                named.places.pop(url, None)
    if not named.places or len(named.places) > _MOST_ADDRESSES:
        unset = "".join(f"; {where}: {variable} is not set here" for where, variable in named.unset.items())
        raise UsageError(
            f"{len(named.places)} addresses are named{unset}; expected 1 to {_MOST_ADDRESSES}, such as "
            "http://10.0.0.1:8000. What Kubernetes or DNS finds is for `discover` (docs/operate.md#discovery)"
        )
    return named


def _is_private(url: str) -> bool:
    """Return whether a URL has no public address: those do not get the engines' key."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError:
        return False
    return not any(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_global for each in found)


def _address(text: str) -> str:
    from gateway.config.urls import address

    url = text if text.startswith("unix:") or "://" in text else f"http://{text}"
    try:
        return address(url.rstrip("/").removesuffix("/v1"))
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None
