"""nginx: the upstream of replicas in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
_GUARDS = {"auth_basic", "auth_request", "auth_jwt", "deny", "ssl_verify_client"}
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MIB = {"": 2.0**-20, "k": 2.0**-10, "m": 1.0, "g": 2.0**10}


@dataclass(slots=True)
class _Directive:
    name: str
    words: list[str]
    within: list[_Directive] = field(default_factory=list)

    def all(self, name: str) -> list[_Directive]:
        return [each for each in self.within if each.name == name]


def read(text: str, upstream: str | None, model: str | None) -> Configuration:
    """Return what the upstream of that name is; of the only one that a `proxy_pass` names if none is given."""
    configuration = Configuration(Router.of("nginx"))
    root = _parse(text)
    passes: dict[tuple[str, str], list[list[_Directive]]] = {}  # of each upstream: the ways to its `proxy_pass`es
    upstreams = {}
    for path in _walk([root]):
        directive = path[-1]
        if directive.name == "upstream" and directive.words:
            upstreams[directive.words[0]] = directive
        elif directive.name == "proxy_pass" and directive.words:
            passes.setdefault(_target(directive.words[0], path), []).append(path)
        elif directive.name == "include" and "mime.types" not in " ".join(directive.words):
            configuration.note(f"include {' '.join(directive.words)}: not read; import what `nginx -T` prints")
    names = [target for target in passes if target[1] in upstreams] or list(passes)
    names = [target for target in names if upstream in {None, target[1]}]
    if len(names) != 1:
        found = ", ".join(name for _, name in names or passes) or "none"
        raise UsageError(f"expected one upstream that a proxy_pass names, or --upstream with its name; found: {found}")
    scheme, name = names[0]
    _add_servers(
        upstreams.get(name) or _Directive("", [], [_Directive("server", [name])]), scheme, model, configuration
    )
    _settings(passes[names[0]], configuration)
    return configuration


def _add_servers(block: _Directive, scheme: str, model: str | None, configuration: Configuration) -> None:
    policy = "round_robin"
    for directive in block.within:
        if directive.name != "server":
            known = " ".join([directive.name, *directive.words[:1]]), directive.name
            chosen = next((name for name in known if name in configuration.router.policies), None)
            if chosen is None:
                configuration.note(configuration.router.not_kept(directive.name))
            policy = chosen or policy
            continue
        address, *flags = directive.words or [""]
        options = dict(flag.partition("=")[::2] for flag in flags)
        url = url_of(address if address.startswith("unix:") else f"{scheme}://{address}")
        if url is None or "down" in options:
            reason = "it is down" if "down" in options else "expected host:port"
            configuration.note(f"server {address} is left out: {reason}")
            continue
        replica = Replica(name_of(url), model, {"url": url})
        if "resolve" in options:
            port = urlsplit(url).port or {"http": 80, "https": 443}[scheme]
            replica.where = {"dns": f"{urlsplit(url).hostname}:{port}"}
        elif not re.search(r"unix:|//[\d.:]+$|//\[|//localhost", url):
            replica.notes.append("nginx spreads over all addresses of a name; if it has several: discover, with dns")
        if options.get("weight", "").isdecimal():
            replica.weight = float(options["weight"])
        replica.notes += [configuration.router.not_kept(key) for key in options if key not in {"weight", "resolve"}]
        configuration.replicas.append(replica)
    configuration.set_policy("", policy)


def _settings(passes: list[list[_Directive]], configuration: Configuration) -> None:
    """Add what the blocks around say, those of the first `proxy_pass` most."""
    blocks = list(reversed(passes[0][:-1]))

    def nearest(name: str) -> list[str]:
        return next((each.words for block in blocks for each in block.all(name)), [])

    listen = [each.words for block in blocks for each in block.all("listen") if each.words]
    address, *options = listen[0] if listen else ["80"]
    configuration.put("server", "host", "0.0.0.0")
    configuration.put("server", "port", int((re.search(r"(?:^|:)(\d+)$", address) or ["", "80"])[1]))
    if "ssl" in options:
        configuration.note("listen ... ssl: not kept; leave nginx in front for TLS, or see server.tls")
    for directive, (section, key) in {
        "proxy_connect_timeout": ("timeouts", "connect_s"),
        "proxy_read_timeout": ("timeouts", "idle_s"),
    }.items():
        if (seconds := _number(nearest(directive), _SECONDS)) > 0:
            configuration.put(section, key, seconds)
            if key == "idle_s":
                configuration.put(section, "first_byte_s", seconds)
    if (mib := _number(nearest("client_max_body_size"), _MIB)) > 0:
        configuration.set_body_limit(mib)
    every = {id(each): each for path in passes for block in path[:-1] for each in block.within}.values()
    guard = next((each for each in every if each.name in _GUARDS and each.words[:1] != ["off"]), None)
    if guard is not None:
        configuration.require_key(guard.name)
    if any(
        each.name == "proxy_set_header" and each.words[:1] in (["Authorization"], ["authorization"]) for each in every
    ):
        configuration.protect(Variable.of("VLLM_API_KEY"))
    for name in dict.fromkeys(each.name for each in every):
        if any(name.startswith(start) for start in configuration.router.reasons):
            configuration.note(configuration.router.not_kept(name))


def _number(words: list[str], units: Mapping[str, float]) -> float:
    """Return a time or size in the unit of `units`; 0 if it is not one."""
    match = re.fullmatch(r"(\d{1,12})([a-z]*)", words[0].lower()) if words else None
    return int(match[1]) * units.get(match[2], 0) if match else 0


def _target(value: str, path: list[_Directive]) -> tuple[str, str]:
    """Return scheme and host of a `proxy_pass`, with what a `set` around gave its variable."""
    for block in reversed(path[:-1]):
        for each in block.all("set"):
            if len(each.words) == 2:
                value = value.replace(each.words[0], each.words[1])
    scheme, found, host = value.partition("://")
    return (scheme, host.partition("/")[0]) if found else ("http", value)


def _walk(path: list[_Directive]) -> Iterator[list[_Directive]]:
    for directive in path[-1].within:
        yield [*path, directive]
        yield from _walk([*path, directive])


def _parse(text: str) -> _Directive:
    """Return the directives in a file of nginx, or in what `nginx -T` prints."""
    stack, words, at = [_Directive("", [])], [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        line = text.count("\n", 0, at) + 1
        if match is None:
            raise UsageError(f"line {line}: a quote without its end")
        at = match.end()
        mark, *quoted = match.groups()
        words += [word for word in quoted if word is not None]
        if mark == "}":
            stack.pop()
        elif mark:
            if not words:
                raise UsageError(f"line {line}: expected a directive before {mark}")
            stack[-1].within.append(_Directive(words[0], words[1:]))
            if mark == "{":
                stack.append(stack[-1].within[-1])
            words = []
        if (mark == "}" and words) or not 0 < len(stack) <= _DEEPEST:
            raise UsageError(f"line {line}: braces or semicolons do not match: expected nginx's configuration")
    if len(stack) != 1 or words:
        raise UsageError("ends within a block or directive: expected the configuration of nginx")
    return stack[0]
