"""Expected outcome of a request on each backend: a regression on the log, for doubly robust estimates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lab.evaluate.log import Log

Floats = npt.NDArray[np.float64]

FOLDS = 3
_MIN_OUTCOMES_PER_FOLD = 50
_MAX_TRAINING_ROWS = 100_000
_MAX_NAMES = 100  # most frequent templates and workloads, which are distinguished
_UNKNOWN = 1e3  # its negative stands for a missing value: no column has such values, so trees can split it off
_RUN = 256  # consecutive requests in one fold, since neighbors are correlated


def fold_of(requests: int, folds: int = FOLDS) -> npt.NDArray[np.int32]:
    """Return the fold of each request, shape (requests,): runs of consecutive requests in turn."""
    run = max(1, min(_RUN, requests // (folds * 10)))
    numbers: npt.NDArray[np.int32] = ((np.arange(requests) // run) % folds).astype(np.int32)
    return numbers


def has_enough_outcomes(outcome: Floats, folds: int = FOLDS) -> bool:
    """Return whether there are enough outcomes for a model.

    Examples
    --------
    >>> has_enough_outcomes(np.ones(100)), has_enough_outcomes(np.ones(200))
    (False, True)
    """
    return int((outcome > 0).sum()) >= _MIN_OUTCOMES_PER_FOLD * folds


def expected_outcomes(log: Log, outcome: Floats, folds: int = FOLDS) -> Floats:
    """Return the expected outcome of each request on each backend, shape (requests, backends).

    Parameters
    ----------
    outcome
        Positive outcomes of which there are enough (`has_enough_outcomes`), NaN if missing, shape (requests,).

    Notes
    -----
    Gradient-boosted trees predict the logarithm of the outcome from the features of the request, the backend and its
    load. They are cross-fitted: each fold is predicted by a model of the other folds. Logarithms are converted back
    with the mean of exp(residual).

    References
    ----------
    Chernozhukov et al., "Double/debiased machine learning", Econometrics Journal 21(1), 2018 (cross-fitting).
    Duan, "Smearing Estimate", JASA 78(383), 1983 (conversion back from logarithms).
    """
    from threadpoolctl import threadpool_limits

    # OpenMP threads wait for each other by spinning: on busy cores a fit took eight times as long with two.
    with threadpool_limits(1, "openmp"):
        return _cross_fitted(log, outcome, folds)


def _cross_fitted(log: Log, outcome: Floats, folds: int) -> Floats:
    known = outcome > 0
    of_request = _columns(log)
    predictions = np.full((log.requests, len(log.backends)), np.nan)
    numbers = fold_of(log.requests, folds)
    rng = np.random.default_rng(0)
    for fold in range(folds):
        training = np.flatnonzero(known & (numbers != fold))
        if len(training) > _MAX_TRAINING_ROWS:
            training = np.sort(rng.choice(training, _MAX_TRAINING_ROWS, replace=False))
        design = _design(log, of_request, training, log.chosen[training])
        logs = np.log(outcome[training])
        model = _fit(design, logs)
        smear = float(np.mean(np.exp(logs - model.predict(design))))
        held_out = np.flatnonzero(numbers == fold)
        for backend in range(len(log.backends)):
            backends = np.full(len(held_out), backend)
            predicted = model.predict(_design(log, of_request, held_out, backends))
            predictions[held_out, backend] = smear * np.exp(predicted)
    return predictions


def _fit(design: Floats, logs: Floats) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor  # takes a second to import

    backend = np.zeros(design.shape[1], bool)
    backend[-3] = True
    leaf = int(np.clip(len(logs) // 100, 10, 200))
    model = HistGradientBoostingRegressor(
        max_iter=80, learning_rate=0.1, max_leaf_nodes=15, min_samples_leaf=leaf, l2_regularization=1.0,
        categorical_features=backend, early_stopping=False, random_state=0,
    )  # fmt: skip
    return model.fit(design, logs)


def _columns(log: Log) -> Floats:
    """Return the columns that do not depend on the backend, shape (requests, columns), without constant ones."""
    names = np.column_stack([_by_frequency(log.names[:, column]) for column in range(log.names.shape[1])])
    columns = np.column_stack([np.nan_to_num(log.numbers, nan=-_UNKNOWN), names])
    return columns[:, columns.min(axis=0) < columns.max(axis=0)]


def _by_frequency(codes: npt.NDArray[np.int32]) -> Floats:
    """Return the frequency rank of each name, with one number for all rare ones, so that trees can split them off."""
    counts = np.bincount(codes)
    rank = np.empty(len(counts))
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return np.minimum(rank, _MAX_NAMES)[codes]


def _design(
    log: Log, of_request: Floats, rows: npt.NDArray[np.intp], backends: npt.NDArray[np.int32 | np.int64]
) -> Floats:
    """Return the columns of the regression: those of the request, the backend, its load and its predicted time."""
    load, prediction = log.in_flight[rows, backends], log.predicted_s[rows, backends]
    prediction = np.log(prediction, where=prediction > 0, out=np.full(len(rows), -_UNKNOWN))
    return np.column_stack([of_request[rows], backends, np.nan_to_num(load, nan=-_UNKNOWN), prediction])
