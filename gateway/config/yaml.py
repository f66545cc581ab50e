"""YAML read with the place of every key and value, `${VARIABLES}` put in, and all that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from backends.validation import Issue, Path

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_TEXTS = {_TAG + kind for kind in ("str", "timestamp", "value")}  # dates stay as they are written
_PLAIN = {_TAG + kind for kind in ("null", "bool", "int", "float", "map", "seq")}
_MOST_NODES = 100_000  # aliases of aliases can make a short file endless
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")


class Place(NamedTuple):
    """A position in the file, counted from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Document:
    """A YAML file as plain data.

    Parameters
    ----------
    keys, values
        Where each key (or list item) starts, and each value that is no list or mapping, by its path.
    faults
        What is wrong with the YAML itself, with the place of each.
    """

    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    issues: list[tuple[Place, Issue]] = field(default_factory=list)

    def place(self, issue: Issue) -> Place:
        """Return where `issue` is: its key or value, or the nearest thing around it that stands in the file."""
        path = issue.path
        if not issue.at_key and path in self.values:
            return self.values[path]
        while path and path not in self.keys:
            path = path[:-1]
        return self.keys.get(path, Place(1, 1))


def read_yaml(text: str, environ: Mapping[str, str]) -> Document:
    """Read one YAML document, safely: no tag makes anything but text, numbers, truth values, lists and mappings.

    In texts `${NAME}` becomes that variable of `environ`, `${NAME:-default}` the default where it is not set or empty,
    and `$${` stands for `${` itself. What a variable holds is text, whatever it looks like, and an unquoted value
    that comes out empty is null. Keys are text as they stand.
    """
    reader = _Reader(environ)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            reader.document.data = reader.read(node, ())
    except yaml.MarkedYAMLError as error:
        reader.document.issues.append(_syntax_fault(error, text))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        reader.document.issues.append(
            (place, Issue((), "a character that YAML does not allow", "write the file in UTF-8"))
        )
    except RecursionError:
        reader.document.issues.append((Place(1, 1), Issue((), "nested too deep")))
    return reader.document


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.document = Document()
        self._environ = environ
        self._constructor = yaml.constructor.SafeConstructor()
        self._open: set[int] = set()
        self._nodes = 0

    def read(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise yaml.MarkedYAMLError(problem="more than can be a pool", problem_mark=node.start_mark)
        if id(node) in self._open:
            raise yaml.MarkedYAMLError(problem="an alias within what it stands for", problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            self.document.values[path] = _place(node)
        self.document.keys.setdefault(path, _place(node))
        if node.tag not in _PLAIN | _TEXTS:
            self._fault(node, path, "a tag (!...) that is not known here", "take it off")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                # What stands here by itself wins over what is merged in, and the first merged over the later ones.
                merged = self._merged(value_node, path) | merged
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(key_node, path, "a key must be one word", "quote `${...}` within braces")
                continue
            key = str(key_node.value)
            if key in own:
                first = self.document.keys[(*path, key)].line
                self._fault(key_node, (*path, key), f"given twice, first at line {first}", "keep one")
                continue
            self.document.keys[(*path, key)] = _place(key_node)
            own[key] = self.read(value_node, (*path, key))
        return merged | own

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self._fault(source, path, "`<<` merges mappings only", "give an alias of a mapping")
                continue
            for key, value in self._mapping(source, path).items():
                merged.setdefault(key, value)
        return merged

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        if node.tag in _TEXTS:
            text = self._expanded(node, path)
            is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
            return None if text == "" and is_plain else text
        try:
            return self._constructor.construct_object(node)
        except (ValueError, KeyError, IndexError):  # `0b_`, `!!bool perhaps`, `!!int ""`
            self._fault(node, path, "reads as a number or a truth value, but is none", "put it in quotes")
        return None

    def _expanded(self, node: yaml.Node, path: Path) -> str:
        def value_of(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, default = match["name"], match["default"]
            if name is None:
                self._fault(
                    node, path, "`${` that no variable follows", "write ${NAME}, ${NAME:-default}, or $${ for ${"
                )
                return ""
            value = self._environ.get(name)
            if default is not None:
                return value or default
            if value is None:
                self._fault(node, path, f"the variable {name} is not set", f"set it, or write ${{{name}:-default}}")
            return value or ""

        return _REFERENCE.sub(value_of, str(node.value))

    def _fault(self, node: yaml.Node, path: Path, message: str, hint: str) -> None:
        self.document.issues.append((_place(node), Issue(path, message, hint)))


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _syntax_fault(error: yaml.MarkedYAMLError, text: str) -> tuple[Place, Issue]:
    mark = error.problem_mark or error.context_mark
    place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
    problem = error.problem or "not YAML"
    if "alias" in problem and "undefined" in problem:
        problem = "an alias (*name) whose anchor (&name) is nowhere before it"  # its name may be a mistaken secret
    lines = text.splitlines()
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    if "\t" in line[: place.column]:
        return place, Issue((), "not YAML: " + problem, "indent with spaces, not tabs")
    hint = "quote `${...}` within braces or brackets" if "${" in line and ("{" in line.replace("${", "")) else ""
    return place, Issue((), "not YAML: " + problem, hint)
