"""What a request would have taken on each backend: a regression on the log, for doubly robust estimates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lab.evaluate.log import Log

Floats = npt.NDArray[np.float64]

FOLDS = 3
_FEWEST = 50
_MOST_TRAINED_ON = 100_000
_MOST_NAMES = 100  # templates and workloads told apart, the most frequent ones
_UNKNOWN = 1e3  # below zero, where trees can cut it off: no column goes there
_RUN = 256  # neighbours resemble each other, and are kept in one fold


def fold_of(requests: int, folds: int = FOLDS) -> npt.NDArray[np.int32]:
    """Return the fold of each request, shape (requests,): runs of neighbours, in turn."""
    run = max(1, min(_RUN, requests // (folds * 10)))
    numbers: npt.NDArray[np.int32] = ((np.arange(requests) // run) % folds).astype(np.int32)
    return numbers


def enough(outcome: Floats, folds: int = FOLDS) -> bool:
    """Whether there are outcomes enough for a model of them."""
    return int((outcome > 0).sum()) >= _FEWEST * folds


def expected(log: Log, outcome: Floats, folds: int = FOLDS) -> Floats:
    """Return what each request would be expected to take on each backend, shape (requests, backends).

    Gradient-boosted trees on the logarithm of the outcome, of the request's features and the backend with its load. The
    model that is asked about a request has not seen it: each fold is predicted by the model of the others (Chernozhukov
    et al., "Double/debiased machine learning", Econometrics Journal 21(1), 2018). Back from logarithms by the mean of
    exp(residual) (Duan, "Smearing Estimate", JASA 78(383), 1983).

    Parameters
    ----------
    outcome
        Positive, NaN where a request has none, shape (requests,).
        There must be `enough`.
    """
    from threadpoolctl import threadpool_limits

    # More threads wait for each other by spinning: on busy cores a fit took eight times as long with two.
    with threadpool_limits(1, "openmp"):
        return _cross_fitted(log, outcome, folds)


def _cross_fitted(log: Log, outcome: Floats, folds: int) -> Floats:
    known = outcome > 0
    of_request = _columns(log)
    answers = np.full((log.requests, len(log.backends)), np.nan)
    numbers = fold_of(log.requests, folds)
    rng = np.random.default_rng(0)
    for fold in range(folds):
        training = np.flatnonzero(known & (numbers != fold))
        if len(training) > _MOST_TRAINED_ON:
            training = np.sort(rng.choice(training, _MOST_TRAINED_ON, replace=False))
        design = _design(log, of_request, training, log.chosen[training])
        logs = np.log(outcome[training])
        model = _fit(design, logs)
        smear = float(np.mean(np.exp(logs - model.predict(design))))
        asked = np.flatnonzero(numbers == fold)
        for place in range(len(log.backends)):
            on = np.full(len(asked), place)
            answers[asked, place] = smear * np.exp(model.predict(_design(log, of_request, asked, on)))
    return answers


def _fit(design: Floats, logs: Floats) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor  # here: it takes a second to import

    backend = np.zeros(design.shape[1], bool)
    backend[-3] = True
    leaf = int(np.clip(len(logs) // 100, 10, 200))
    model = HistGradientBoostingRegressor(
        max_iter=80, learning_rate=0.1, max_leaf_nodes=15, min_samples_leaf=leaf, l2_regularization=1.0,
        categorical_features=backend, early_stopping=False, random_state=0,
    )  # fmt: skip
    return model.fit(design, logs)


def _columns(log: Log) -> Floats:
    """Return what is the same for all backends, shape (requests, columns); columns that tell nothing are left out."""
    names = np.column_stack([_by_frequency(log.names[:, place]) for place in range(log.names.shape[1])])
    columns = np.column_stack([np.nan_to_num(log.numbers, nan=-_UNKNOWN), names])
    return columns[:, columns.min(axis=0) < columns.max(axis=0)]


def _by_frequency(codes: npt.NDArray[np.int32]) -> Floats:
    """Return numbers for names, by how often they come, rare ones alike: trees can cut the rare off the frequent."""
    counts = np.bincount(codes)
    rank = np.empty(len(counts))
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return np.minimum(rank, _MOST_NAMES)[codes]


def _design(
    log: Log, of_request: Floats, rows: npt.NDArray[np.intp], backends: npt.NDArray[np.int32 | np.int64]
) -> Floats:
    """Return the columns of a regression: the request's, then the backend, its requests in flight, its prediction."""
    load, prediction = log.in_flight[rows, backends], log.predicted_s[rows, backends]
    prediction = np.log(prediction, where=prediction > 0, out=np.full(len(rows), -_UNKNOWN))
    return np.column_stack([of_request[rows], backends, np.nan_to_num(load, nan=-_UNKNOWN), prediction])
