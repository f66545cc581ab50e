"""nginx: the upstream of replicas in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from backends.validation import UsageError
from gateway.config.pool_text import Variable
from gateway.config.short_forms import name_of
from gateway.importer.configuration import Configuration, Replica, Router, url_of

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|([;{}])|"((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|((?:\\.|\$\{|[^\s;{}"'\\])(?:\\.|\$\{|[^\s;{\\])*)""",
    re.DOTALL | re.VERBOSE,
)
_DEEPEST = 16
_GUARD = re.compile(
    r"(auth_basic|auth_request|auth_jwt|deny|ssl_verify_client|access_by_lua\w*) (?!off$)|if .*\{return 4(01|03|44)"
)
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MIB = {"": 2.0**-20, "k": 2.0**-10, "m": 1.0, "g": 2.0**10}
_TIMEOUTS = {"connect_s": "proxy_connect_timeout", "idle_s": "proxy_read_timeout", "first_byte_s": "proxy_read_timeout"}


class _Directive(NamedTuple):
    words: list[str]
    within: list[_Directive]

    def __str__(self) -> str:
        return " ".join(self.words) + "".join(f" {{{each}}}" for each in self.within)


def read(text: str, upstream: str | None, model: str | None) -> Configuration:
    """Return what the upstream of that name is; of the only one that a `proxy_pass` names if none is given."""
    configuration = Configuration(Router.of("nginx"))
    passes: dict[tuple[str, str], list[list[_Directive]]] = {}  # of each target: the blocks around its `proxy_pass`es
    upstreams: dict[str, list[_Directive]] = {}
    for *around, directive in _walk([_parse(text)]):
        name, value = directive.words[0], " ".join(directive.words[1:])
        if name == "upstream":
            upstreams[value] = directive.within
        elif name == "proxy_pass":
            passes.setdefault(_target(value, around), []).append(around)
        elif name == "include" and "mime.types" not in value:
            configuration.note(f"include {value}: not read; import what `nginx -T` prints")
    targets = [target for target in passes if target[1] in upstreams] or list(passes)
    chosen = [target for target in targets if upstream in {None, target[1]}]
    if len(chosen) != 1:
        found = ", ".join(name for _, name in targets) or "none"
        raise UsageError(f"expected one upstream that a proxy_pass names, or --upstream with its name; found: {found}")
    scheme, name = chosen[0]
    configuration.set_policy("", "round_robin")
    for directive in upstreams.get(name) or [_Directive(["server", name], [])]:
        _add(directive, scheme, model, configuration)
    _settings(passes[chosen[0]], configuration)
    return configuration


def _add(directive: _Directive, scheme: str, model: str | None, configuration: Configuration) -> None:
    """Add the replica, or the policy, of a directive of the upstream."""
    router = configuration.router
    if directive.words[0] != "server":
        names = [" ".join(directive.words[:2]), directive.words[0]]
        if known := [name for name in names if name in router.policies]:
            configuration.set_policy("", known[0])
        else:
            configuration.note(router.not_kept(names[1]))
        return
    address, *flags = directive.words[1:] or [""]
    options = dict(flag.partition("=")[::2] for flag in flags)
    url = url_of(address if address.startswith("unix:") else f"{scheme}://{address}")
    if url is None or "down" in options:
        reason = "it is down" if "down" in options else "expected host:port"
        configuration.note(f"server {address} is left out: {reason}")
        return
    replica = Replica(name_of(url), model, {"url": url})
    if "resolve" in options:
        parts = urlsplit(url)
        replica.where = {"dns": f"{parts.hostname}:{parts.port or {'http': 80, 'https': 443}[scheme]}"}
    elif not re.search(r"unix:|//[\d.:]+$|//\[|//localhost", url):
        replica.notes.append("nginx spreads over all addresses of a name; if it has several: discover, with dns")
    replica.weight = _number(options.get("weight", ""), {"": 1.0}) or None
    replica.notes += [router.not_kept(key) for key in options if key not in {"weight", "resolve"}]
    configuration.replicas.append(replica)


def _settings(passes: list[list[_Directive]], configuration: Configuration) -> None:
    """Add what the blocks around say, those of the first `proxy_pass` most."""
    nearest = {each.words[0]: each.words[1:] for block in passes[0] for each in reversed(block.within)}
    listen = [*nearest.get("listen", []), "80"]
    match = re.fullmatch(r"(?:(.+):)?(\d+)", listen[0])
    host, port = match.groups() if match else ("127.0.0.1", "80")  # an address alone, or a socket
    configuration.put("server", "host", (host or "*").strip("[]").replace("*", "0.0.0.0"))
    configuration.put("server", "port", int(port))
    if "ssl" in listen:
        configuration.note("listen ... ssl: not kept; leave nginx in front for TLS, or see server.tls")
    for key, name in _TIMEOUTS.items():
        if seconds := _number("".join(nearest.get(name, [])), _SECONDS):
            configuration.put("timeouts", key, seconds)
    if mib := _number("".join(nearest.get("client_max_body_size", [])), _MIB):
        configuration.set_body_limit(mib)
    texts = {str(each): each.words[0] for path in passes for block in path for each in block.within}
    if guards := [name for text, name in texts.items() if _GUARD.match(text)]:
        configuration.require_key(guards[0])
    if any(re.match(r"proxy_set_header authorization \S", text, re.IGNORECASE) for text in texts):
        configuration.protect(Variable.of("VLLM_API_KEY"))
    for name in dict.fromkeys(texts.values()):
        if name.startswith(tuple(configuration.router.reasons)):
            configuration.note(configuration.router.not_kept(name))


def _number(text: str, units: Mapping[str, float]) -> float:
    """Return a time or size, such as 1h30m, in the unit of `units`; 0 if it is not one."""
    parts = re.findall(r"(\d{1,12})([a-z]*)", text.lower())
    return sum(int(number) * units.get(unit, 0) for number, unit in parts)


def _target(value: str, around: list[_Directive]) -> tuple[str, str]:
    """Return scheme and host of a `proxy_pass`, with what a `set` around gave its variable."""
    for each in (each for block in reversed(around) for each in block.within):
        if each.words[0] == "set" and len(each.words) == 3:
            value = value.replace(each.words[1], each.words[2])
    scheme, found, host = value.partition("://")
    return (scheme, re.split(r"(?<=.)[/$]", host)[0]) if found else ("http", value)


def _walk(path: list[_Directive]) -> Iterator[list[_Directive]]:
    for directive in path[-1].within:
        yield [*path, directive]
        yield from _walk([*path, directive])


def _parse(text: str) -> _Directive:
    """Return the directives in a file of nginx, or in what `nginx -T` prints."""
    stack, words, at = [_Directive([], [])], [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(text, at, "a quote without its end")
        begun, at = at, match.end()
        mark, *quoted = match.groups()
        words += [word for word in quoted if word is not None]
        if mark in {";", "{"}:
            if not words:
                raise _error(text, begun, f"expected a directive before {mark}")
            stack[-1].within.append(_Directive(words, []))
            stack += [stack[-1].within[-1]] * (mark == "{")
            words = []
        elif mark:
            stack.pop()
        if (mark == "}" and words) or not 0 < len(stack) <= _DEEPEST:
            raise _error(text, begun, "braces or semicolons do not match: expected nginx's configuration")
    if len(stack) != 1 or words:
        raise UsageError("ends within a block or directive: expected the configuration of nginx")
    return stack[0]


def _error(text: str, at: int, problem: str) -> UsageError:
    return UsageError(f"line {text.count(chr(10), 0, at) + 1}: {problem}")
