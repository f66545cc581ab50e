"""Finds the addresses in any text: another router's configuration, its flags, or a script.

The text is searched, not parsed: for URLs, for hosts with a port, and for a host and a port on separate keys. Variables
that the text or the environment sets are substituted first.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import Final

from backends.validation import UsageError
from gateway.config.urls import address

_HOST = r"\[[\da-fA-F:.]+\]|[\w.-]+"
_END = r"(?![\w\0]|[.:-][\w\0])"
_URL: Final = re.compile(rf"\b(https?)://(?:[^\s/@\"']*@)?({_HOST})(:\d{{1,5}})?{_END}")
_NAMED = r"\[[\da-fA-F:.]+\]|\d+(?:\.\d+){3}|[A-Za-z][\w-]*(?:\.[\w-]+)*"
_PLACE: Final = re.compile(rf"(?<![\w.:/@\0-])({_NAMED}):(\d{{2,5}}){_END}")
_NGINX: Final = re.compile(rf"(?:^|[{{;\s])server\s+(?:({_NAMED})(?=[\s;])[^{{;]{{0,200}};|(unix:/[^\s;:]+))")
_PART: Final = re.compile(
    r"""(?:^|(?<=[\s{,;"'(\[]))([\w.-]*?)(host(?:name)?|address|addr|ip|port(?:_?(?:value|number))?)["']?"""
    r"""\s*[=:\s]\s*["']?(\[[\da-fA-F:.]+\]|[^\s"',;{}\[\]()]+)""",
    re.IGNORECASE,
)
_PAIR_LINES: Final = 4
"""How far apart a host and its port may be."""
_EVERYWHERE: Final = frozenset({"0.0.0.0", "[::]", "::", "*"})  # where a router listens, which is no engine
_LEAST_PORT, _MOST_PORT = 80, 65_535

_ASSIGNED: Final = re.compile(r"""(?:^|(?<=[\s;]))([A-Za-z_]\w*)\+?=("[^"]*"|'[^']*'|\([^)]*\)|[^\s;]*)""")
_LOOP: Final = re.compile(r"\bfor\s+(\w+)\s+in\s+([^;\n]+)")
_NUMBERS: Final = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}|(?:\$\(|`)seq\s+(\d{1,9})\s+(\d{1,9})[)`]")
_REFERENCE: Final = re.compile(r"\$\{(\w+)(?:\[[^\]]*\])?(?::?[-=]([^}]*))?\}|\$(\w+)|\bos\.environ/(\w+)")
_SUM: Final = re.compile(r"\$\(\(([^()]*)\)\)")
_COMMAND: Final = re.compile(r"\$\((?!seq )[^()]*\)")
_UNSET: Final = re.compile(
    r"""(?:://[^\s"']*|(?:url|worker|backend|server|endpoint|base)s?["']?[\s=:]+["']?)\0(\w+)\0"""
)
_MOST_FORMS: Final = 64  # per line: combinations of its variables' values

_KEY: Final = re.compile(r"""(?<![\w.-])[\w.-]++(?=["']?\s*[=:\s])""")
_SETTING: Final = re.compile(
    r"api[-_]?key|master[-_]?key|password|secret|authorization|\bauth_|\b[rt]pm$|weight$|rate[-_]?limit|limit_(?:req|conn)"
    r"|max[-_](?:parallel|concurrent)|timeout",
    re.IGNORECASE,
)
"""Keys, limits and weights, which are not copied."""
_NAME: Final = re.compile(r"""\bmodel_name["']?\s*[=:]\s*["']?([\w./:-]+)""")
"""What clients call a model."""
_OFF: Final = re.compile(r"""["']?\s*[=:\s]\s*["']?(?:false|off|no|none|null|0|""|'')\b""", re.IGNORECASE)
_OF_ENGINES: Final = frozenset(
    ("chunked", "chunk", "partial", "long", "max", "min", "num", "attention", "tokens", "size", "delayer", "backend")
)
"""Words next to `prefill` in options of an engine that also decodes."""
_DISKS: Final = frozenset({"ssd", "standard", "balanced", "extreme"})

_Parts = dict[str, tuple[int, list[str], str]]
"""Hosts and ports on separate keys, by the prefix of those keys: the last line, the hosts, and the port."""


@dataclass(slots=True)
class Addresses:
    r"""The addresses found in texts.

    Examples
    --------
    >>> found = Addresses()
    >>> found.search('P=80\nfor i in 1 2; do W="$W http://10.0.0.$i:${P}00/v1"; done', "a.sh")
    >>> found.places
    {'http://10.0.0.1:8000': 'a.sh, line 2', 'http://10.0.0.2:8000': 'a.sh, line 2'}
    """

    places: dict[str, str] = field(default_factory=dict)  # file and line of each URL, in order
    unset: dict[str, str] = field(default_factory=dict)  # variables without a value, by the place of their address
    settings: dict[str, str] = field(default_factory=dict)  # places of keys, limits and weights, by name
    names: dict[str, str] = field(default_factory=dict)  # places of what clients call models

    def search(self, text: str, name: str) -> None:
        """Add the addresses in a text; raise `UsageError` if it describes replicas that only prefill."""
        own = {f"http://{name}" for name in re.findall(r"\bupstream\s+([\w.-]+)\s*\{", text)}
        values: dict[str, list[str]] = {}
        parts: _Parts = {}
        for number, written in enumerate(text.splitlines(), 1):
            line, place = re.sub(r"(?:^|(?<=\s))#.*", "", written), f"{name}, line {number}"
            if word := _apart(line):
                raise UsageError(f"{place}: {word} tells prefill and decode apart; each replica has to do both here")
            for key in filter(_SETTING.search, _KEY.findall(line)):
                self.settings.setdefault(key.lstrip("-"), place)
            for called in _NAME.findall(line):
                self.names.setdefault(called, place)
            forms = [*_forms(line, values)]
            for variable, words in (match.groups() for form in forms for match in _LOOP.finditer(form)):
                values[variable] = _NUMBERS.sub(_counted, words).split()
                forms = [*_forms(line, values)]
            for form in forms:
                for match in _UNSET.finditer(form):
                    self.unset.setdefault(place, match[1])
                for url in (*_whole(form), *_paired(form, number, parts)):
                    if url not in own:
                        self.places.setdefault(url, place)
            assigned = [match.groups() for form in forms for match in _ASSIGNED.finditer(form)]
            for variable in {variable for variable, _ in assigned}:
                values[variable] = [each.strip("\"'()") for known, each in assigned if known == variable]
        self.unset = {place: variable for place, variable in self.unset.items() if variable not in values}


def _apart(line: str) -> str:
    """Return the word of a line which says that some replicas only prefill; empty if none does."""
    for match in re.finditer(r"[A-Za-z\d][\w-]*", line):
        parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", match[0])]
        joined, others = "".join(parts), set(parts)
        prefills = others & {"prefill", "prefills", "prefiller", "prefillers"} and not others & _OF_ENGINES
        is_pd = ("pd" in others and not others & _DISKS) or re.fullmatch(r"\d+p\d+d|xpyd", joined)
        of_transfer = joined in {"kvproducer", "kvconsumer", "nixlrole"}
        if (prefills or is_pd or of_transfer or "disagg" in joined) and not _OFF.match(line, match.end()):
            return match[0]
    return ""


def _forms(line: str, values: dict[str, list[str]]) -> Iterator[str]:
    """Yield a line with each combination of its variables' values; put a variable without one between zero bytes."""
    line = _SUM.sub(lambda match: "$((" + re.sub(r"\$?\b([A-Za-z_]\w*)", r"$\1", match[1]) + "))", line)
    options: dict[str, list[str]] = {}
    for match in _REFERENCE.finditer(line):
        variable = match[1] or match[3] or match[4]
        known = os.environ.get(variable, match[2])
        options[variable] = values.get(variable) or [f"\0{variable}\0" if known is None else known]
    for combination in islice(product(*options.values()), _MOST_FORMS):
        chosen = dict(zip(options, combination, strict=True))
        form = _REFERENCE.sub(partial(_chosen, chosen), line)
        yield _COMMAND.sub("\0command\0", _SUM.sub(_summed, form))


def _chosen(values: Mapping[str, str], match: re.Match[str]) -> str:
    return values[match[1] or match[3] or match[4]]


def _summed(match: re.Match[str]) -> str:
    text = match[1].replace(" ", "")
    if not re.fullmatch(r"[\d+*-]{1,40}", text):
        return "\0sum\0"
    return str(sum(math.prod(map(int, term.split("*"))) for term in re.findall(r"[+-]?\d+(?:\*\d+)*", text)))


def _counted(match: re.Match[str]) -> str:
    first, last = (int(each) for each in match.groups() if each)
    return " ".join(map(str, range(first, min(last, first + _MOST_FORMS) + 1)))


def _whole(form: str) -> Iterator[str]:
    """Yield the URLs of a line, including those of hosts with a port."""
    for scheme, host, port in _URL.findall(form):
        yield from _checked(scheme, host, port[1:])
    for host, port in _PLACE.findall(form):
        if int(port) >= _LEAST_PORT and not host.lower().endswith("port"):
            yield from _checked("http", host, port)
    for host, path in _NGINX.findall(form):
        yield from [path] if path else _checked("http", host, "")


def _paired(form: str, number: int, parts: _Parts) -> Iterator[str]:
    """Yield the URLs of hosts and ports on separate keys, paired by the names of those keys."""
    for before, key, value in _PART.findall(form):
        name = before.strip("-_.").lower()
        since, hosts, port = parts.pop(name, (number, list[str](), ""))
        if number - since > _PAIR_LINES:
            hosts, port = [], ""
        if key.lower().startswith("port"):
            port = value if value.isdigit() else ""
        elif re.fullmatch(_NAMED, value):
            hosts = [*hosts, value]
        if hosts and port:
            for host in hosts:
                yield from _checked("http", host, port)
        else:
            parts[name] = number, hosts, port


def _checked(scheme: str, host: str, port: str) -> Iterator[str]:
    with contextlib.suppress(ValueError):  # what only looks like an address
        if host not in _EVERYWHERE and (not port or 0 < int(port) <= _MOST_PORT):
            yield address(f"{scheme}://{host}{port and f':{port}'}")
