"""A pool of four replicas, its requests and answers, for the tests of `learned`."""

from __future__ import annotations

from random import Random
from typing import Any

from backends.backend import Backend
from backends.speculation import Method
from policies.decision import Decision, Outcome
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings

METHODS = {Method.BASELINE: 0, Method.NGRAM: 5, Method.SUFFIX: 24, Method.EAGLE3: 3}
STEP_S = 0.012


def request(workload: str = "chat", **features: Any) -> RequestFeatures:
    values = {"temperature": 0.0, "prompt_tokens": 200, "workload": workload, **features}
    return RequestFeatures("m", Endpoint.CHAT, **values)


def answer(asked: RequestFeatures, decision: Decision, method: Method, **values: Any) -> Outcome:
    """Return an answer of 150 tokens, whose steps take the usual time."""
    per_step = values.pop("per_step", 1.0 if method is Method.BASELINE else 2.0)
    step_s = values.pop("step_s", STEP_S)
    decode_s = (150 / per_step - 1) * step_s
    usual = {"tpot_s": decode_s / 149, "output_tokens": 150, "tokens_per_step": per_step, "prompt_tokens": 200}
    times = {"ttft_s": 0.02, "e2e_s": 0.02 + decode_s}
    return Outcome(asked, decision, method, 200, **(usual | times | values))


class Pool:
    """The replicas under `learned`; each answer comes before the next request."""

    def __init__(self, **settings: Any) -> None:
        self.backends = [Backend(method.value, "m", method, "http://a", k) for method, k in METHODS.items()]
        self.policy = Learned(LearnedSettings(seed=1, **{"guardrail": {"share": 0}, **settings}))
        self.now_s, self.rng = 1e6, Random(3)
        self.policy.set_clock(lambda: self.now_s)

    def send(self, name: str, asked: RequestFeatures, **values: Any) -> None:
        """Send a request to a replica, and learn from its answer."""
        backend = next(one for one in self.backends if one.name == name)
        decision = self.policy.follow(Decision(name, "x", "y"), asked, [backend])
        outcome = answer(asked, decision, backend.method, **values)
        self.now_s += outcome.e2e_s
        self.policy.observe(outcome)

    def teach(self, asked: RequestFeatures, times: int = 40, **per_step: float) -> None:
        """Send requests to each replica, answered with these tokens per step, give or take a tenth."""
        for _ in range(times):
            for backend in self.backends:
                usual = per_step.get(backend.name, 1.0)
                drawn = 1.0 + (usual - 1.0) * self.rng.uniform(0.9, 1.1)
                self.send(backend.name, asked, per_step=drawn, step_s=STEP_S * self.rng.uniform(0.97, 1.03))
        self.fit()

    def fit(self) -> None:
        if (work := self.policy.maintenance()) is not None:
            work()

    def costs(self, asked: RequestFeatures) -> dict[str, float]:
        """Return the cost of a request on each replica."""
        return {each.backend: each.score or 0.0 for each in self.policy.assess(asked, self.backends)}
