"""Colours of methods and of other series: names of the properties in the dashboard's `tokens.css`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

_METHODS = {"baseline", "ngram", "suffix", "eagle", "eagle3", "draft_model"}
_SERIES = 8
_SHARES = (100, 65, 40, 20)


def series_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, in order.

    Examples
    --------
    >>> series_colors(["a", "b"])
    {'a': 'var(--s1)', 'b': 'var(--s2)'}
    """
    return {name: f"var(--s{index % _SERIES + 1})" for index, name in enumerate(dict.fromkeys(names))}


def method_color(method: str) -> str:
    """Return the colour of a method.

    Examples
    --------
    >>> method_color("draft_model"), method_color("medusa")
    ('var(--m-draft-model)', 'var(--m-other)')
    """
    return f"var(--m-{method.replace('_', '-')})" if method in _METHODS else "var(--m-other)"


def backend_colors(methods: Mapping[str, str | None]) -> dict[str, str]:
    """Return a colour for each backend: that of its method, nearer to the text's for each further one of that method.

    Examples
    --------
    >>> backend_colors({"a": "ngram", "b": "ngram"})
    {'a': 'var(--m-ngram)', 'b': 'color-mix(in srgb, var(--m-ngram) 65%, var(--ink))'}
    """
    unknown = series_colors(name for name, method in methods.items() if method is None)
    seen: Counter[str] = Counter()
    colors = {}
    for name, method in methods.items():
        color = unknown[name] if method is None else method_color(method)
        share = _SHARES[seen[color] % len(_SHARES)]
        seen[color] += 1
        colors[name] = color if share == 100 else f"color-mix(in srgb, {color} {share}%, var(--ink))"
    return colors
