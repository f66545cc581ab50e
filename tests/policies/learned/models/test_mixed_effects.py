"""Effects are shrunk towards zero according to their spread and their observations."""

from __future__ import annotations

import numpy as np
import pytest

from policies.learned.models.mixed_effects import Effects, Factor, fit_effects

NOISE = 0.5
FIRST = Factor(lambda key: key[0], 0.3)


def _sums(observed: dict[tuple[str, ...], list[float]]) -> dict[tuple[str, ...], tuple[float, float, float]]:
    return {
        key: (float(len(values)), float(sum(values)), float(sum(value * value for value in values)))
        for key, values in observed.items()
    }


def _fit(observed: dict[tuple[str, ...], list[float]], *factors: Factor, mean_spread: float = 1.0) -> Effects:
    return fit_effects(_sums(observed), factors, expected=lambda key: 0.0, mean_spread=mean_spread, noise=NOISE)


@pytest.mark.parametrize("count", [1, 4, 100])
def test_a_single_factor_shrinks_by_the_closed_formula(count: int) -> None:
    fitted = _fit({("a",): [1.0] * count}, FIRST, mean_spread=1e-9)
    spread2, noise2 = 0.3**2, NOISE**2
    assert fitted.predict(("a",)) == pytest.approx(count * spread2 / (count * spread2 + noise2), rel=1e-6)
    assert fitted.predict(("b",)) == pytest.approx(0.0, abs=1e-6)


def test_several_levels_equal_the_best_linear_prediction() -> None:
    """The same prediction, computed from the covariance of the observations instead of the normal equations."""
    observed: dict[tuple[str, ...], list[float]] = {("a",): [0.2] * 3, ("b",): [0.9] * 7, ("c",): [-0.4]}
    fitted = _fit(observed, FIRST, mean_spread=0.8)
    means = np.array([values[0] for values in observed.values()])
    counts = np.array([len(values) for values in observed.values()])
    covariance = 0.8**2 * np.ones((3, 3)) + 0.3**2 * np.eye(3) + np.diag(NOISE**2 / counts)
    solved = np.linalg.solve(covariance, means)
    assert fitted.mean == pytest.approx(0.8**2 * solved.sum())
    for index, key in enumerate(observed):
        assert fitted.predict(key) == pytest.approx(fitted.mean + 0.3**2 * solved[index])


def test_known_effects_are_recovered() -> None:
    rng = np.random.default_rng(5)
    workload = {"chat": 0.0, "code": 0.5, "math": -0.3}
    template = {f"t{number}": effect for number, effect in enumerate(rng.normal(0, 0.2, 12))}
    size = {"short": 0.1, "long": -0.1}
    observed: dict[tuple[str, ...], list[float]] = {}
    for _ in range(6000):
        key = (str(rng.choice([*workload])), str(rng.choice([*template])), str(rng.choice([*size])))
        true = 1.0 + workload[key[0]] + template[key[1]] + size[key[2]]
        observed.setdefault(key, []).append(true + rng.normal(0, 0.25))
    fitted = _fit(
        observed, Factor(lambda key: key[0], 0.5), Factor(lambda key: key[1], 0.3), Factor(lambda key: key[2], 0.2)
    )
    for seen in observed:
        true = 1.0 + workload[seen[0]] + template[seen[1]] + size[seen[2]]
        assert fitted.predict(seen) == pytest.approx(true, abs=0.06)
    # A new combination is the sum of its effects, and a new template counts as average.
    mean_effect = np.mean([*template.values()])
    assert fitted.predict(("code", "new", "short")) == pytest.approx(1.6 + mean_effect, abs=0.15)
    assert fitted.noise == pytest.approx(0.25, abs=0.02)


def test_a_rare_level_is_predicted_mainly_by_its_kind() -> None:
    kind, own = Factor(lambda key: key[0], 0.5), Factor(lambda key: key[1], 0.3)
    observed: dict[tuple[str, ...], list[float]] = {("code", f"t{number}"): [1.0] * 30 for number in range(8)}
    observed["code", "once"] = [3.0]
    observed["code", "often"] = [3.0] * 300
    fitted = _fit(observed, kind, own)
    unseen, once, often = (fitted.predict(("code", name)) for name in ("unseen", "once", "often"))
    assert unseen < once < often
    assert abs(once - unseen) < 0.4 * abs(3.0 - unseen)
    assert often == pytest.approx(3.0, abs=0.1)


def test_effects_are_differences_from_the_expectation() -> None:
    buckets = _sums({("a",): [2.5] * 50, ("b",): [1.5] * 50})
    expected: dict[tuple[str, ...], float] = {("a",): 2.5, ("b",): 1.5}
    fitted = fit_effects(buckets, [FIRST], expected=expected.__getitem__, mean_spread=1.0, noise=NOISE)
    assert [fitted.predict(key) for key in expected] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_an_unknown_level_has_no_effect() -> None:
    fitted = _fit({("",): [1.0] * 10, ("a",): [2.0] * 10}, FIRST)
    assert "" not in fitted.by_level[0]
    assert fitted.predict(("",)) == fitted.mean


def test_without_observations_effects_are_zero() -> None:
    empty: list[dict[tuple[str, ...], list[float]]] = [{}, {("a",): []}]
    for observed in empty:
        fitted = _fit(observed, FIRST)
        assert fitted.predict(("a",)) == 0.0
        assert fitted.noise == NOISE


def test_what_no_factor_explains_is_noise() -> None:
    """The buckets agree in themselves, and differ by more than their factor may."""
    fitted = _fit({("a", str(number)): [(-1.0) ** number] * 100 for number in range(10)}, FIRST)
    assert fitted.noise == pytest.approx(1.0, rel=0.02)
