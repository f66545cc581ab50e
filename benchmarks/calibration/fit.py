"""Fit of a setup's step times to the fitting part of the measurements; the printed result is reviewed and kept by hand.

In a closed loop the order of steps does not depend on their durations, so a run's time is linear in the parameters of
`StepTime` and `Drafting`: one run gives their coefficients, and Gauss-Newton iterations do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import Calibration, Drafting, StepTime
from backends.speculation import Method
from benchmarks.calibration.cases import Case
from benchmarks.calibration.play import Played

Floats = npt.NDArray[np.float64]

STEP = (
    "base_s",
    "per_token_below_knee_s",
    "per_token_above_knee_s",
    "per_request_s",
    "per_context_token_s",
    "no_graph_s",
    "speculation_overhead_s",
)
DRAFT = ("base_s", "per_pass_s", "per_request_s", "adaptive_s")
"""Parameters in the order of `play.FEATURES`."""

Name = tuple[Method | None, str]
"""A parameter: of a method's drafting, or with None of the target's step."""

OUTER, INNER = 3, 60
HUBER = 0.10  # relative error beyond which a row counts linearly instead of quadratically
PRIOR = 0.05  # weight of staying near the initial values, in rows


@dataclass(frozen=True, slots=True)
class _Timed:
    """A time as a function of the parameters: constant + sums @ values."""

    constant: float
    sums: Floats

    def seconds(self, values: Floats) -> float:
        return self.constant + float(self.sums @ values)


@dataclass(frozen=True, slots=True)
class _Observation:
    """A measured log(time / over); `over` is another time, for speedups."""

    time: _Timed
    over: _Timed | None
    measured: float

    def residual(self, values: Floats) -> tuple[float, Floats]:
        seconds = self.time.seconds(values)
        error, slope = np.log(seconds) - self.measured, self.time.sums * values / seconds
        if self.over is not None:
            other = self.over.seconds(values)
            error, slope = error - np.log(other), slope - self.over.sums * values / other
        return float(error), slope


def fit(
    calibration: Calibration,
    cases: Sequence[Case],
    free: Sequence[Name],
    play: Callable[[Case, Calibration], Played],
    rounds: int = OUTER,
) -> Calibration:
    """Return the calibration with the `free` parameters fitted to the measurements of `cases`.

    Parameters
    ----------
    cases
        Cases of the fitting part, including baselines.
    free
        Parameters to fit; their initial values must be positive.
    play
        Function that plays a case.
    rounds
        How often the cases are played; once is enough where the order of steps does not depend on their durations.
    """
    for _ in range(rounds):
        played = {id(case): play(case, calibration) for case in cases}
        values = np.array([_value(calibration, name) for name in free])
        observations = _observations(calibration, cases, free, played)
        calibration = _changed(calibration, dict(zip(free, _solve(observations, values).tolist(), strict=True)))
    return calibration


def _solve(observations: Sequence[_Observation], start: Floats) -> Floats:
    """Minimize Huber's loss of the log errors over positive values, by Gauss-Newton in their logs."""
    logs = np.log(start)
    for _ in range(INNER):
        values = np.exp(logs)
        pairs = [observation.residual(values) for observation in observations]
        errors, slopes = np.array([error for error, _ in pairs]), np.array([slope for _, slope in pairs])
        weights = np.minimum(1, HUBER / np.maximum(np.abs(errors), 1e-9))
        left = slopes.T @ (slopes * weights[:, None]) + PRIOR * np.eye(len(logs))
        right = slopes.T @ (errors * weights) + PRIOR * (logs - np.log(start))
        logs = logs - np.clip(np.linalg.solve(left, right), -0.5, 0.5)
        logs = np.clip(logs, np.log(start) - 4, np.log(start) + 4)
    return np.exp(logs)


def _observations(
    calibration: Calibration, cases: Sequence[Case], free: Sequence[Name], played: dict[int, Played]
) -> list[_Observation]:
    plain = {case.group: case for case in cases if case.is_baseline}
    observations = []
    for case in cases:
        total, decode = (_timed(calibration, case, free, played[id(case)], decoding=flag) for flag in (False, True))
        figures = played[id(case)].figures
        for quantity, measured in case.measured.items():
            if quantity == "output_tok_s":
                # Tokens / time: the simulation gives the number of tokens.
                tokens = figures[quantity] * total.seconds(_values(calibration, free))
                observations.append(_Observation(total, None, float(np.log(tokens / measured))))
            elif quantity in ("tok_s_per_request", "step_ms", "itl_median_ms", "tpot_median_ms"):
                ratio = (
                    figures[quantity] / measured if quantity == "tok_s_per_request" else measured / figures[quantity]
                )
                seconds = decode.seconds(_values(calibration, free))
                observations.append(_Observation(decode, None, float(np.log(seconds * ratio))))
            elif quantity == "speedup":
                base = plain[case.group]
                other = _timed(calibration, base, free, played[id(base)], decoding=False)
                observations.append(_Observation(total, other, float(-np.log(measured))))
    return observations


def _timed(calibration: Calibration, case: Case, free: Sequence[Name], played: Played, *, decoding: bool) -> _Timed:
    """Return a run's time (or that of its requests while decoding) as a function of the free parameters."""
    features = played.decode_features if decoding else played.features
    names: list[Name] = [(None, name) for name in STEP] + [(case.method, name) for name in DRAFT]
    sums = np.zeros(len(free))
    for name, feature in zip(names, features.tolist(), strict=True):
        if name in free:
            sums[free.index(name)] = feature
    total = played.decode_s if decoding else played.busy_s
    return _Timed(total - float(sums @ _values(calibration, free)), sums)


def _values(calibration: Calibration, free: Sequence[Name]) -> Floats:
    return np.array([_value(calibration, name) for name in free])


def _value(calibration: Calibration, name: Name) -> float:
    method, parameter = name
    group: StepTime | Drafting = calibration.step if method is None else calibration.method(method).drafting
    value = float(getattr(group, parameter))
    if value <= 0:
        raise ValueError(f"{calibration.name}: {parameter} of {method or 'the step'} must be above 0 to be fitted")
    return value


def _changed(calibration: Calibration, values: dict[Name, float]) -> Calibration:
    step = {parameter: value for (method, parameter), value in values.items() if method is None}
    methods = dict(calibration.methods)
    for (method, parameter), value in values.items():
        if method is not None:
            drafting = methods[method].drafting.model_copy(update={parameter: value})
            methods[method] = methods[method].model_copy(update={"drafting": drafting})
    return calibration.model_copy(update={"step": calibration.step.model_copy(update=step), "methods": methods})


def as_yaml(calibration: Calibration, free: Sequence[Name]) -> str:
    """Return the fitted parameters in the format of a calibration file."""
    lines = []
    for group in dict.fromkeys(method for method, _ in free):
        lines.append(f"{group or 'step'}:")
        lines += [f"  {name}: {_value(calibration, (method, name)):.3g}" for method, name in free if method == group]
    return "\n".join(lines)
