"""`gateway canary`: one replica tries another way of speculating, and keeps it only if that is better."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from backends.health import SERVING
from backends.speculation import Method, method_named
from backends.validation import UsageError, did_you_mean
from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url, failure
from gateway.cli.output import say
from gateway.rooms.compare.comparing import Block, seconds_of

_POLL_S: Final = 2.0
_RESTART_S: Final = 120.0
"""Longest restart of the gateway, which finishes its requests first."""
_QUIET: Final = 4.0
"""Blocks of time without a counted one after which it reports a lack of requests."""
_STARTED: Final = frozenset({"ready", "backoff"})


def canary(
    replica: Annotated[str, typer.Option(help="The replica that tries it.")],
    config: Annotated[str, typer.Option("--with", help="Its new --speculative-config, as JSON; {} for none.")],
    *,
    lasts: Annotated[str, typer.Option("--for", help="Longest duration of the comparison: 90m, 2h, 1d.")] = "2h",
    block: Block = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Annotated[str | None, typer.Option(help="The model.  [default: the only one with that replica]")] = None,
) -> None:
    """Try a way of speculating on one replica; keep it if it is better.

    It drains the replica and restarts its engine, or says how to if the gateway did not start it. Then it compares the
    replica with those that serve as it did; it gets no more than its share until that is decided. If it is not better,
    its engine is restarted as before, or it is drained again. Ctrl-C leaves the comparison running.

    \b
    gateway canary --replica head --with '{"method": "suffix", "num_speculative_tokens": 24}'
    """
    (wanted, document), last_s = _wanted(config), seconds_of(lasts)
    admin = Admin(url, admin_key)
    name, members = _model(admin, replica, model)
    alike = _alike(replica, members, (wanted, _rest(document)))
    is_own = "process" in members[replica]
    if is_own and members[replica]["simulated"]:
        raise UsageError(f"{replica} is simulated, so it has no engine that could be started anew")
    if admin.get("/admin/compare")["models"].get(name, {}).get("stage") == "running":
        raise UsageError(f"replicas of {name} are being compared; end that first: `gateway compare stop`")
    reference, admin = {"model": name, "backend": replica}, replace(admin, patience_s=_RESTART_S)
    admin.post("/admin/drain", **reference)
    again = f"After Ctrl-C, `gateway resume {replica}` has it serve again."
    say(f"{replica} gets no new requests; waiting for those in flight. {again}")
    _drained(admin, name, replica)
    if is_own:
        try:
            _started(admin, reference, document)
        except typer.Exit:  # it serves as before
            admin.post("/admin/resume", **reference)
            raise
    else:
        flag = f"with --speculative-config '{config}'" if document else "without --speculative-config"
        say(
            f"Now start its engine anew, {flag}.\nWhere the pool file names it: change `method` and "
            f"`speculative_config` there too, and `gateway reload`.\nWaiting until it is {_words(wanted)} ... "
            f"{again}"
        )
        if (came := _back(admin, name, replica, members, wanted)) != replica:
            say(f"{came} has come in place of {replica}.")
            replica = reference["backend"] = came
    arms = {"a": ",".join(alike), "b": replica}
    timing = {"for_s": last_s, "block_s": block and seconds_of(block), "usual": False}
    ends = None
    try:
        begun = replace(admin, model=name).post("/admin/compare/start", **arms, **timing)
    except typer.Exit:
        pass  # it has said why
    else:
        admin.post("/admin/resume", **reference)
        say(f"It is back, and is compared with {arms['a']}. `gateway compare status` shows what is known.")
        ends = _ended(replace(admin, model=name), name, begun)
    if ends is not None and ends[0] == replica:
        stays = f", and write it into the pool file: it serves so until the gateway ends\n{config}" if is_own else "."
        say(f"Keep it{stays}")
        return
    admin.post("/admin/drain", **reference)
    if not is_own:
        say(f"{replica} gets no new requests: start its engine as before, then `gateway resume {replica}`.")
        raise typer.Exit(1)
    say("Its engine is started as before.")
    _restored(admin, reference)
    raise typer.Exit(1)


Way = tuple[str, int]
"""Method and number of drafted tokens."""


def _wanted(config: str) -> tuple[Way, dict[str, Any]]:
    """Parse a config in JSON; return its `Way`, and the config."""
    try:
        document = json.loads(config)
    except ValueError as error:
        raise UsageError(f"--with is no JSON: {error}") from None
    if document == {}:
        return ("baseline", 0), document
    if not isinstance(document, dict) or not isinstance(document.get("method"), str):
        raise UsageError('--with is no speculative config; expected {"method": ..., "num_speculative_tokens": ...}')
    method, k = method_named(document["method"]), document.get("num_speculative_tokens")
    if method is None:
        raise UsageError(
            f"--with has no method of vLLM: {document['method']!r}; {did_you_mean(document['method'], Method)}"
        )
    if not isinstance(k, int):
        raise UsageError("--with lacks num_speculative_tokens, by which it is known when the engine is back")
    return (method.value, k), document


def _way(each: dict[str, Any]) -> Way:
    return each["method"], each["num_speculative_tokens"]


def _words(way: Way) -> str:
    return f"{way[0]} with {way[1]} tokens" if way[1] else way[0]


def _model(admin: Admin, replica: str, model: str | None) -> tuple[str, dict[str, Any]]:
    models = admin.get("/admin/pool")["models"]
    found = [name for name, each in models.items() if replica in each["backends"] and model in {None, name}]
    if len(found) != 1:
        known = ", ".join(f"{name}/{each}" for name in models for each in models[name]["backends"])
        raise UsageError(
            f"{'no replica' if not found else 'several models have a replica'} {replica}; there are: {known}"
        )
    return found[0], models[found[0]]["backends"]


def _rest(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rest of a speculative config besides its `Way`, such as the head."""
    return {name: value for name, value in config.items() if name not in {"method", "num_speculative_tokens"}}


def _alike(replica: str, members: dict[str, Any], wanted: tuple[Way, dict[str, Any]]) -> list[str]:
    """Return the replicas to compare it with; `wanted` includes the `_rest` of its config."""
    ways = {name: (_way(each), _rest(each["speculative_config"])) for name, each in members.items()}
    own = ways.pop(replica)
    alike = [other for other, way in ways.items() if way == own and members[other]["state"] in SERVING]
    if not alike:
        raise UsageError(
            f"no other replica that is up serves as {replica} does, so there is nothing to compare it with"
        )
    if own == wanted:
        raise UsageError(f"{replica} serves so already: {_words(wanted[0])}")
    if taken := {replica, *alike} & {wanted[0][0], *(each["method"] for each in members.values())}:
        raise UsageError(f"{taken.pop()} names a replica and a method, which a comparison cannot tell apart: rename it")
    return alike


def _started(admin: Admin, reference: dict[str, str], config: dict[str, Any] | None) -> None:
    """Restart an engine of the gateway and wait until it is ready; if it does not start, restore the previous one."""
    model, replica = reference["model"], reference["backend"]
    before = _members(admin, model)[replica]["pid"]
    admin.post("/admin/try", **reference, speculative_config=config)
    say(f"The engine of {replica} is started anew; waiting until it is ready ...")
    found = _until(admin, model, replica, lambda each: each["process"] in _STARTED and each["pid"] != before)
    if found["process"] == "ready":
        return
    why = f"The engine of {replica} does not start: {found['last_exit']}"
    if config is None:
        raise failure(f"{why}. The gateway goes on trying.")
    say(f"{why}. It is started as before.", err=True)
    _started(admin, reference, None)
    raise typer.Exit(1)


def _restored(admin: Admin, reference: dict[str, str]) -> None:
    """Restart the engine of a drained replica as before; it serves once that is ready."""
    _drained(admin, reference["model"], reference["backend"])
    try:
        _started(admin, reference, None)
    finally:
        admin.post("/admin/resume", **reference)


def _members(admin: Admin, model: str) -> dict[str, Any]:
    """Return the replicas of a model; if a reload has removed it, print a message and exit 1."""
    found = admin.get("/admin/pool")["models"].get(model)
    if found is None:
        raise failure(f"{model} is no longer in the pool file")
    return dict(found["backends"])


def _until(admin: Admin, model: str, replica: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Wait until a condition holds for a replica, which may be away meanwhile; return its description."""
    while not ((each := _members(admin, model).get(replica)) and holds(each)):
        time.sleep(_POLL_S)
    return dict(each)


def _back(admin: Admin, model: str, replica: str, before: dict[str, Any], wanted: Way) -> str:
    """Wait until a restarted engine serves as wanted; return its replica, a new one if its pod was replaced."""
    is_restarted = _way(before[replica]) != wanted  # another head shows by the restart alone
    while True:
        now = _members(admin, model)
        is_restarted |= replica not in now or now[replica]["state"] == "down"
        for name in [replica] if replica in now else now.keys() - before.keys():
            if is_restarted and _way(now[name]) == wanted and now[name]["state"] not in {"down", "starting"}:
                return name
        time.sleep(_POLL_S)


def _drained(admin: Admin, model: str, replica: str) -> None:
    """Wait until nothing is in flight at a replica; say so if requests of other processes are."""
    found = _until(admin, model, replica, lambda each: not each["in_flight"])
    if found["others"]:
        others = "another worker or gateway, or clients that know its address"
        say(f"Still waiting for {found['others']} requests at {replica} that others have sent: {others}.")
        _until(admin, model, replica, lambda each: not each["in_flight"] + each["others"])


def _ended(admin: Admin, model: str, begun: dict[str, Any]) -> tuple[str, str] | None:
    """Wait for the end of a comparison and print its result; return the better arm and the other one, if known.

    The answering worker may not know of it yet.
    """
    from gateway.rooms.compare.report import better_of

    is_told = False
    while True:
        found = admin.get("/admin/compare")["models"].get(model)
        if found and found["id"] == begun["id"]:
            if found["stage"] != "running":
                say(found["sentence"])
                return better_of(found)
            if not is_told and not found["blocks"] and 60.0 * found["minutes"] > _QUIET * found["block_s"]:
                say(f"It waits for requests: in {found['minutes']:g} min none of {model} has counted.")
                is_told = True
        if found and found["id"] != begun["id"] and found["began_s"] > begun["began_s"]:
            say("Another comparison was begun before what this one has shown was read.")
            return None
        time.sleep(_POLL_S)
