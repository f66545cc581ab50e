"""What long prompts cost: from the time to the first token, in a simulated pool."""

from __future__ import annotations

import numpy as np
import pytest

from backends.calibration.calibration import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import ReplicaSpec, replay
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.step_time import PromptTime, weighed
from policies.learned.policy import Learned, LearnedSettings

MACHINE = "llama-3.1-70b-4xh100"
DEPTH = {"num_speculative_tokens": 3}


def test_a_stall_counts_as_a_factor_of_three() -> None:
    calm, stalled = PromptTime(), PromptTime()
    for number in range(40):
        calm.learn(2.0, 100_000)
        stalled.learn(900.0 if number == 20 else 2.0, 100_000)
    assert stalled.token_s(2e-5) < 1.06 * calm.token_s(2e-5)


def test_short_prompts_tell_nothing() -> None:
    time = PromptTime()
    time.learn(9.0, 500)
    time.learn(-1.0, 50_000)
    assert time.token_s(2e-5) == 2e-5


def test_long_prompts_are_predicted_from_their_first_tokens() -> None:
    """Few prompts are long, so the load of steps says little of what a prompt token takes."""
    rng = np.random.default_rng(4)
    arrived_s = np.cumsum(rng.exponential(5.0, 250))
    requests = []
    for number, at_s in enumerate(arrived_s.tolist()):
        tokens = int(rng.integers(30_000, 90_000))
        features = RequestFeatures("m", Endpoint.CHAT, prompt_tokens=tokens, workload="code")
        requests.append(ReplayRequest(at_s, features, tokens, 200 + number % 50, {}, None, ()))
    policy = Learned(LearnedSettings(seed=1))
    pool = [ReplicaSpec(name, Method.EAGLE3, DEPTH, MACHINE) for name in "ab"]
    replay(pool, requests, policy)
    step, prompt = EngineParameters.of(load_calibration(MACHINE), Method.EAGLE3, DEPTH).step, 60_000
    true_s = step.per_token_above_knee_s * prompt + step.per_attended_s * prompt**2 / 2
    work = weighed(prompt, 0, policy.predictor.attention)
    for model in policy.predictor.backend_models.values():
        assert model.prior.per_prompt_token_s * work < 0.8 * true_s
        assert model.prompt_time.token_s(model.per_prompt_token_s) * work == pytest.approx(true_s, rel=0.15)
