"""Three gateways that share statistics predict the same as one gateway with all of their traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import pytest

from backends.simulator.engine.fleet import Completion, Fleet, Replica
from gateway.state.ledger import Ledger
from gateway.state.store import Store
from lab.replay.simulate import outcome_of
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.keys import key_of
from policies.learned.policy import Learned, LearnedSettings
from tests.gateway.state.conftest import Stores
from tests.support.simulated import Call, calls, replicas
from tests.support.state_member import Clock

GATEWAYS = 3


@dataclass
class Gateway:
    """The parts of a gateway that learn and share statistics."""

    policy: Learned
    ledger: Ledger
    store: Store

    @classmethod
    def create(cls, store: Store, clock: Clock, seed: int) -> Gateway:
        policy = Learned(LearnedSettings(seed=seed))
        policy.set_clock(clock)
        return cls(policy, Ledger("m", policy.statistics, uuid4().hex), store)

    def serve(self, call: Call, replica: Replica, ended: Completion) -> None:
        """Route a request to the given replica, and observe its outcome."""
        decision = self.policy.choose(call.features, [replica])
        self.policy.observe(outcome_of(call.features, decision, ended, replica.method))

    def sync(self) -> None:
        self.ledger.stage()
        self.ledger.exchange(self.store, self.store.stamps())
        self.ledger.settle()


def _know_templates(policy: Learned, requests: Sequence[Call]) -> None:
    """Show the templates of all requests to a policy: each gateway would know one a few requests later than another."""
    for call in requests:
        policy.templates.key(call.features)
        policy.templates.key(call.features)


def _simulated(requests: Sequence[Call], pool: list[Replica]) -> list[Completion]:
    """Return the outcomes of requests served by the replicas in turn, in order of arrival."""
    fleet = Fleet(pool, 0)
    ended = []
    for number, call in enumerate(requests):
        ended += fleet.advance(call.arrived_s)
        kind = call.features.workload
        fleet.submit(number % len(pool), call.features.prompt_tokens, call.output_tokens, call.arrived_s, kind=kind)
    return sorted([*ended, *fleet.advance(math.inf)], key=lambda completion: completion.request_id)


def _predictions(fitted: FittedModels, requests: Sequence[Call]) -> list[float]:
    """Return the predictions for some requests, and the fitted step times of the replicas."""
    values = [cost for name in sorted(fitted.steps) for cost in fitted.steps[name]]
    values += [fitted.observed[name] for name in sorted(fitted.observed)]
    for call in requests:
        key = key_of(call.features)
        values.append(fitted.length.tokens(call.features, key))
        values += [fitted.acceptance.tokens_per_step(arm, "", key) for arm in ("ngram:5", "suffix:24", "eagle3:3")]
    return values


def test_three_gateways_predict_as_one_with_all_of_their_traffic(stores: Stores) -> None:
    clock, requests, pool = Clock(), calls(300, 10.0, 1), replicas()
    one, *three = [Gateway.create(stores.open(), clock, seed) for seed in range(1 + GATEWAYS)]
    alone = Gateway.create(stores.open(), clock, 9)
    for gateway in (one, *three, alone):
        _know_templates(gateway.policy, requests)
    for number, (call, ended) in enumerate(zip(requests, _simulated(requests, pool), strict=True)):
        replica = pool[ended.replica]
        one.serve(call, replica, ended)
        three[number % GATEWAYS].serve(call, replica, ended)
        if number % GATEWAYS == 0:
            alone.serve(call, replica, ended)
        if number % 25 == 24:
            three[number // 25 % GATEWAYS].sync()  # in arbitrary order
    for _ in range(3):
        for gateway in three:
            gateway.sync()
    priors = {name: known.prior for name, known in one.policy.predictor.backend_models.items()}
    expected = _predictions(one.policy.fitted(priors), requests[:40])
    for gateway in three:
        assert _predictions(gateway.policy.fitted(priors), requests[:40]) == pytest.approx(expected, rel=1e-6)
    assert _predictions(alone.policy.fitted(priors), requests[:40]) != pytest.approx(expected, rel=1e-2)
