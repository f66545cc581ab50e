"""The sentence that reports begin with: who won and by how much, or that nobody did."""

from __future__ import annotations

from collections.abc import Mapping

from lab.statistics import Interval

Compared = Mapping[tuple[str, str], Interval | None]
"""Mean time of the first over that of the second, on requests that both served."""


def winner(mean_s: Mapping[str, float], compared: Compared, failed: Mapping[str, str]) -> str:
    """Return who took the least time to finish, if that is shown against each other.

    Parameters
    ----------
    mean_s
        Mean time to finish in seconds, by name; NaN for one that served nothing.
    compared
        Ratios of all pairs with their 95% intervals. One without ends shows nothing.
    failed
        What those did who failed requests, such as `failed 3 of 20 requests`; they cannot win.

    Examples
    --------
    >>> winner({"a": 1.0, "b": 1.25}, {("a", "b"): Interval(0.8, 0.7, 0.9)}, {})
    'a won: its mean time to finish is 20.0% (95%: 10.0% to 30.0%) shorter than that of b.'
    >>> winner({"a": 1.0, "b": 1.25}, {("a", "b"): Interval(0.8, 0.6, 1.1)}, {})
    'Nobody won: the mean time to finish of a is 20.0% (95%: -10.0% to 40.0%) shorter than that of b, maybe by chance.'
    """
    without = "".join(f" {name} {what} and cannot win." for name, what in failed.items())
    ranked = sorted(mean_s.keys() - failed.keys(), key=lambda name: (mean_s[name], name))
    if not ranked:
        return f"Nobody won.{without}"
    best, *others = ranked
    if not others:
        return f"{best} won: it alone failed no request.{without}" if failed else f"{best} is alone: nobody to compare."
    ratios = {name: compared.get((best, name)) for name in others}
    for name, ratio in ratios.items():
        if ratio is None or not ratio.is_known:
            shorter = "" if ratio is None else f": {1 - ratio.value:.1%} shorter in the mean"
            why = "there is no interval that tells it from chance"
            return f"Nobody is shown to win: {best} finishes before {name}{shorter}, but {why}.{without}"
        if ratio.low == ratio.high == 1:
            return f"Nobody won: {best} and {name} take the same time to finish.{without}"
        if ratio.high >= 1:
            said = f"the mean time to finish of {best} is {_shorter(ratio)} shorter than that of {name}"
            return f"Nobody won: {said}, maybe by chance.{without}"
    second = others[0]
    gain = ratios[second]
    assert gain is not None
    next_one = f"{second}, the next" if others[1:] else second
    return f"{best} won: its mean time to finish is {_shorter(gain)} shorter than that of {next_one}.{without}"


def _shorter(ratio: Interval) -> str:
    saved = ratio.saved()
    return f"{saved.value:.1%} (95%: {saved.low:.1%} to {saved.high:.1%})"
