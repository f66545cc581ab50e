"""YAML files: a reader that expands `${VARIABLES}` and keeps the position of every key, value and error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from backends.validation import Issue, Path

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_TEXTS = {_TAG + kind for kind in ("str", "timestamp", "value")}  # dates stay as written
_PLAIN = {_TAG + kind for kind in ("null", "bool", "int", "float", "map", "seq")}
_MAX_NODES = 100_000  # nested aliases can expand a short file exponentially
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")


class Position(NamedTuple):
    """A position in the file, counted from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Document:
    """A YAML file as plain data."""

    data: Any = None  # the document; None if it is empty or not valid YAML
    keys: dict[Path, Position] = field(default_factory=dict)  # position of each key or list item, by its path
    values: dict[Path, Position] = field(default_factory=dict)  # position of each scalar value, by its path
    # Errors in the YAML itself, with their positions.
    issues: list[tuple[Position, Issue]] = field(default_factory=list)

    def position(self, issue: Issue) -> Position:
        """Return the position of the key or value of `issue`, else of its nearest parent in the file."""
        path = issue.path
        if not issue.at_key and path in self.values:
            return self.values[path]
        while path and path not in self.keys:
            path = path[:-1]
        return self.keys.get(path, Position(1, 1))


def read_yaml(text: str, environ: Mapping[str, str]) -> Document:
    """Read one YAML document, limited to strings, numbers, booleans, lists and mappings.

    In strings, `${NAME}` expands to that variable of `environ`, `${NAME:-default}` to the default if the variable is
    unset or empty, and `$${` to a literal `${`. A variable's value is always a string, never parsed as YAML; an
    unquoted value that expands to nothing is null. Keys are not expanded.

    Examples
    --------
    >>> read_yaml("port: ${PORT:-8080}", {"PORT": "9000"}).data
    {'port': '9000'}
    """
    reader = _Reader(environ)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            reader.document.data = reader.read(node, ())
    except yaml.MarkedYAMLError as error:
        reader.document.issues.append(_syntax_issue(error, text))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        position = Position(before.count("\n") + 1, len(before) - before.rfind("\n"))
        reader.document.issues.append(
            (position, Issue((), "a character that YAML does not allow", "write the file in UTF-8"))
        )
    except RecursionError:
        reader.document.issues.append((Position(1, 1), Issue((), "nested too deep")))
    return reader.document


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.document = Document()
        self._environ = environ
        self._constructor = yaml.constructor.SafeConstructor()
        self._open: set[int] = set()
        self._nodes = 0

    def read(self, node: yaml.Node, path: Path) -> Any:
        self._count(node)
        if id(node) in self._open:
            raise yaml.MarkedYAMLError(problem="an alias inside its own anchor", problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            self.document.values[path] = _position(node)
        self.document.keys.setdefault(path, _position(node))
        if node.tag not in _PLAIN | _TEXTS:
            self._report(node, path, "unknown tag (!...)", "remove it")
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

    def _count(self, node: yaml.Node) -> None:
        """Count a visit to a node; aliases and merges can cause many more visits than the file has nodes."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise yaml.MarkedYAMLError(problem="too large, with its aliases", problem_mark=node.start_mark)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                # Keys of the mapping override merged ones, and earlier merges override later ones.
                merged = self._merged(value_node, path) | merged
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(key_node, path, "a key must be a plain word", "quote `${...}` inside braces")
                continue
            key = str(key_node.value)
            if key in own:
                first = self.document.keys[(*path, key)].line
                self._report(key_node, (*path, key), f"duplicate key, first set on line {first}", "keep one")
                continue
            self.document.keys[(*path, key)] = _position(key_node)
            own[key] = self.read(value_node, (*path, key))
        return merged | own

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            self._count(source)
            if not isinstance(source, yaml.MappingNode):
                self._report(source, path, "`<<` merges mappings only", "use an alias of a mapping")
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
        except (ValueError, KeyError, IndexError, OverflowError):  # `0b_`, `!!bool perhaps`, `!!int ""`, `1:1:...:1.5`
            self._report(node, path, "looks like a number or boolean, but is neither", "put it in quotes")
        return None

    def _expanded(self, node: yaml.Node, path: Path) -> str:
        def value_of(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, default = match["name"], match["default"]
            if name is None:
                self._report(
                    node, path, "`${` without a variable name", "write ${NAME}, ${NAME:-default}, or $${ for ${"
                )
                return ""
            value = self._environ.get(name)
            if default is not None:
                return value or default
            if value is None:
                self._report(node, path, f"the variable {name} is not set", f"set it, or write ${{{name}:-default}}")
            return value or ""

        return _REFERENCE.sub(value_of, str(node.value))

    def _report(self, node: yaml.Node, path: Path, message: str, hint: str) -> None:
        self.document.issues.append((_position(node), Issue(path, message, hint)))


def _position(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _syntax_issue(error: yaml.MarkedYAMLError, text: str) -> tuple[Position, Issue]:
    mark = error.problem_mark or error.context_mark
    position = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
    problem = error.problem or "not YAML"
    if "alias" in problem and "undefined" in problem:
        # Without the name, which may be a misplaced secret.
        problem = "an alias (*name) without an earlier anchor (&name)"
    lines = text.splitlines()
    line = lines[position.line - 1] if position.line <= len(lines) else ""
    if "\t" in line[: position.column]:
        return position, Issue((), "not YAML: " + problem, "indent with spaces, not tabs")
    hint = "quote `${...}` inside braces or brackets" if "${" in line and ("{" in line.replace("${", "")) else ""
    return position, Issue((), "not YAML: " + problem, hint)
