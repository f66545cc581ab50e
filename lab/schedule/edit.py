"""Values set in the text of a pool file, of which everything else stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from backends.validation import UsageError


def with_speculation(text: str, model: str, changes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a pool file with keys of backends' `speculative_config` set; comments and layout are kept.

    Examples
    --------
    >>> pool = "models: {m: {backends: {head: {speculative_config: {num_speculative_tokens: 3}}}}} # ours"
    >>> with_speculation(pool, "m", {"head": {"num_speculative_tokens": 5}})
    'models: {m: {backends: {head: {speculative_config: {num_speculative_tokens: 5}}}}} # ours'
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    edits: list[tuple[int, int, str]] = []
    sections: dict[int, str] = {}
    for backend, values in changes.items():
        path = ("models", model, "backends", backend, "speculative_config")
        node: yaml.Node | None = root
        for key in path:
            node = _value(node, key)
            if node is None or (key == path[-1] and _value(node, "num_speculative_tokens") is None):
                raise UsageError(f"the pool file has no {'.'.join(path)} in its own text: set {dict(values)} by hand")
        if sections.setdefault(id(node), backend) != backend:
            shared = f"{sections[id(node)]} and {backend}"
            raise UsageError(f"{shared} share one speculative_config by an alias: give each its own")
        assert isinstance(node, yaml.MappingNode)
        edits += _edits(node, values)
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _edits(node: yaml.MappingNode, values: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yield the replacements of text, as start, end and new text; a new key follows `num_speculative_tokens`."""
    after = next(pair for pair in node.value if pair[0].value == "num_speculative_tokens")
    separator = ", " if node.flow_style else "\n" + " " * after[0].start_mark.column
    known = {key: _value(node, key) for key in values}
    added = "".join(f"{separator}{key}: {json.dumps(values[key])}" for key, old in known.items() if old is None)
    for key, old in known.items():
        if old is not None:
            new = json.dumps(values[key]) + (added if old is after[1] else "")
            yield old.start_mark.index, _end(old), new


def _end(node: yaml.Node) -> int:
    """Return where the text of a value ends; the mark of a block also takes in the lines up to the next key."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
