"""The page of every key of a pool file, from its JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from backends.speculation import Method
from gateway.config.schema import pool_schema
from policies.policy import policies
from scripts.reference.tables import anchor, table

Node = dict[str, Any]
EXAMPLES = Path(__file__).with_name("examples.yaml")
_HEAD = """\
# Pool file: every key

What each key takes, in short; `gateway schema` prints all that is said of it, for editors too. `scripts/docs` makes
this page. [The pool file](../configuration.md) explains how the sections work together.

`NAME` stands for a name of your choice, and `[]` for an entry of a list. A key without a default may be left out,
unless it is *required*. Any value can be a variable, `${VARIABLE}`.
"""


class _Page:
    """The sections of the page, each definition of the schema where it is first used."""

    def __init__(self) -> None:
        schema = pool_schema()
        self._definitions: dict[str, Node] = schema["$defs"]
        self._root: Node = schema
        self._examples = read_examples()
        self._headings: dict[str, str] = {}
        self._of_policies: dict[tuple[str, ...], str] = {}  # rows, and the title of the first policy that has them
        self._said: set[str] = set()  # what rows above say of the sections that they lead to
        self._name_sections(schema, "")

    def text(self) -> str:
        """Return the page."""
        sections = [self._section("PoolSettings", self._root, "Top level")]
        sections += [self._section(name, self._definitions[name], title) for name, title in self._headings.items()]
        return _HEAD + "".join(sections)

    def _name_sections(self, node: Node, path: str) -> None:
        """Name each definition with keys by the path of its first place in the file, in the order of the file."""
        for key, child in node["properties"].items():
            for name, place in self._uses(child, f"{path}.{key}" if path else key):
                definition = self._definitions[name]
                for kind in _alternatives(definition):
                    self._headings[kind] = f"`{place}`: `{self._policy(kind)}`"
                    self._name_sections(self._definitions[kind], place)
                if "properties" in definition and name not in self._headings:
                    self._headings[name] = f"`{place}`"
                    self._name_sections(definition, place)

    def _uses(self, node: Node, path: str) -> Iterator[tuple[str, str]]:
        if "$ref" in node:
            yield _target(node), path
        for part in node.get("anyOf", []):
            yield from self._uses(part, path)
        if isinstance(node.get("items"), dict):
            yield from self._uses(node["items"], f"{path}[]")
        if isinstance(node.get("additionalProperties"), dict):
            yield from self._uses(node["additionalProperties"], f"{path}.NAME")

    def _section(self, name: str, definition: Node, title: str) -> str:
        required = set(definition.get("required", []))
        rows = [
            [
                f"`{key}`",
                self._type(child),
                "*required*" if key in required else _default(child),
                f"{_linked(_first_sentence(self._description(child)))} {self._example(name, key, child)}".strip(),
            ]
            for key, child in definition["properties"].items()
            if "const" not in child
        ]
        text = f"\n## {title}\n"
        if (about := _linked(_first_sentence(self._about(name, definition)))) not in self._said:
            text += f"\n{about}\n"
        self._said |= {row[-1] for row in rows}
        if name.endswith("Reference"):
            known = [row for row in rows if tuple(row) in self._of_policies]
            rows = [row for row in rows if row not in known]
            if known:
                titles = [*self._headings.values()]
                first = max((self._of_policies[tuple(row)] for row in known), key=titles.index)
                text += f"Also {', '.join(row[0] for row in known)}, as {first.rpartition(' ')[2]} above.\n"
            self._of_policies |= {tuple(row): title for row in rows}
        return text + ("\n" + table(["key", "takes", "default", "meaning"], rows) if rows else "")

    def _example(self, name: str, key: str, child: Node) -> str:
        """Return the example of a key, if neither what it takes nor its default says enough.

        Raises
        ------
        LookupError
            If there is none.
        """
        if _SAYS_ENOUGH.match(self._type(child)) or _default(child):
            return ""
        examples = self._examples.get(name, {})
        if key not in examples:
            raise LookupError(f"add an example of {name}.{key} to {EXAMPLES}")
        return f"`{_flow({key: examples[key]})}`"

    def _about(self, name: str, definition: Node) -> str:
        text: str = definition.get("description", "")
        if not text and name.endswith("Reference"):
            policy = policies()[definition["properties"]["name"]["const"]]
            text = (policy.__doc__ or "").partition("\n")[0]
        return text.split("\n\n")[0].replace(" [1]_", "")

    def _description(self, node: Node) -> str:
        used = [self._definitions[name] for name, _ in self._uses(node, "")]
        return str(node.get("description") or next((one["description"] for one in used if "description" in one), ""))

    def _type(self, node: Node) -> str:
        if "$ref" in node:
            return self._type_of_definition(_target(node))
        if "anyOf" in node:
            parts = [self._type(part) for part in node["anyOf"] if part.get("pattern") != r"\$\{"]
            return " or ".join(dict.fromkeys(part for part in parts if part))
        if "enum" in node:
            return _choice(node["enum"])
        if "const" in node:
            return f"`{node['const']}`"
        if isinstance(node.get("type"), list):
            return " or ".join(_WORDS[kind] for kind in node["type"])
        if node.get("type") == "array":
            items = node.get("items") or {}
            return (f"list of {self._type(items)}" if items else "list") + _number(node)
        if node.get("type") == "object":
            values = node.get("additionalProperties")
            named = f"mapping of names to {self._type(values)}" if isinstance(values, dict) and values else "mapping"
            return named + _number(node)
        return _WORDS.get(node.get("type", ""), "any value") + _bounds(node)

    def _type_of_definition(self, name: str) -> str:
        definition = self._definitions[name]
        if "properties" in definition:
            return f"[mapping]({anchor(self._headings[name])})"
        if kinds := _alternatives(definition):
            return ", ".join(f"[{self._policy(kind)}]({anchor(self._headings[kind])})" for kind in kinds)
        return self._type({key: value for key, value in definition.items() if key != "description"})

    def _policy(self, name: str) -> str:
        return str(self._definitions[name]["properties"]["name"]["const"])


_SAYS_ENOUGH = re.compile(r"number|integer|`true`|.*\[mapping\]|\[method\]|`none`|`\w+`, `\w+`")
_WORDS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "`true`, `false`",
    "null": "",
}


def _target(node: Node) -> str:
    return str(node["$ref"]).rpartition("/")[2]


def _alternatives(definition: Node) -> list[str]:
    """Return the names of the definitions that one is a choice of: the policies."""
    parts = definition.get("anyOf", [])
    return [_target(part) for part in parts] if all("$ref" in part for part in parts) else []


def _choice(values: list[str]) -> str:
    if values == list(policies()):
        return "its name alone"
    if values == list(Method):
        return "[method](../configuration.md#speculative_config)"
    return ", ".join(f"`{value}`" for value in values)


def _bounds(node: Node) -> str:
    low = {"minimum": "≥", "exclusiveMinimum": ">"}
    high = {"maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {node[key]:g}" for key, sign in {**low, **high}.items() if key in node]
    if "pattern" in node and node["pattern"].startswith("^[0-9a-fA-F]{64}"):
        found.append("64 hexadecimal digits")
    return f" {', '.join(found)}" if found else ""


def _number(node: Node) -> str:
    least = node.get("minItems", node.get("minProperties"))
    return "" if least in (None, 1) else f" ({least})" if least == node.get("maxItems") else f" (at least {least})"


def _default(node: Node) -> str:
    value = node.get("default")
    if value in (None, [], {}) or isinstance(value, dict):
        return ""
    return "below" if isinstance(value, list) and len(value) > 3 else f"`{_flow(value)}`"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text[1:-1] if isinstance(value, dict) else text


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text, maxsplit=1)[0]


def _linked(text: str) -> str:
    """Return a description with the pages that it names as links."""
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1.md](../\1.md)", text)


def pool_file_page() -> str:
    """Return the page."""
    page = _Page().text()
    paths = "\n".join(pool_schema()["properties"]["paths"]["default"])
    return f"{page}\n## Default of `paths`\n\n```text\n{paths}\n```\n"


def read_examples() -> dict[str, Node]:
    """Return the example of each key, by definition of the schema."""
    examples: dict[str, Node] = yaml.safe_load(EXAMPLES.read_text("utf-8"))
    return examples
