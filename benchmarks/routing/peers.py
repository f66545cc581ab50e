"""A greedy policy, for comparison only."""

from __future__ import annotations

from policies.features.request import RequestFeatures
from policies.learned.cost import Cost
from policies.learned.models.backend_model import Prediction
from policies.learned.policy import Learned, LearnedSettings


class OwnTime(Cost):
    """The predicted time of the request itself, without the delay of others."""

    def of(self, request: RequestFeatures, predictions: list[Prediction]) -> tuple[list[float], float]:
        return [prediction.own_s for prediction in predictions], 0.0


class Greedy(Learned):
    """`learned`, except that each request goes where it is fastest itself."""

    name = "greedy"

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.cost = OwnTime()
        self._assemble()
