"""Measure the CPU time of a decision of `learned`: `python -m benchmarks.choose`.

Prints microseconds per request, the best of nine. There are eight candidates with requests in flight, a policy that has
observed and fitted 4,000 requests of 20 templates, and 500 different requests to route. `predict` evaluates the models
for all eight candidates; `choose` includes that, their costs, exploration, the comparison with `least_loaded` and
bookkeeping; `observe` follows when an answer has ended. The first line says whether the modules are compiled
(docs/performance.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from backends.backend import Backend, EngineLoad, State
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.learned import predict as predict_module
from policies.learned.models.keys import key_of
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Decision, Outcome

_METHODS = ((Method.BASELINE, 0), (Method.NGRAM, 5), (Method.SUFFIX, 32), (Method.EAGLE3, 3))
_REQUESTS = 500
_WORKLOADS = ("chat", "code", "rag", "")


def pool() -> list[Backend]:
    """Return eight backends, two of each method, with some load."""
    backends = []
    for number in range(8):
        method, k = _METHODS[number // 2]
        load = EngineLoad(running=6 + number, waiting=number == 7, others=2, at_s=time.monotonic())
        backend = Backend(f"b{number}", "m", method, "http://127.0.0.1:1", k, state=State.UP, load=load)
        backend.in_flight = 3 + number % 4
        backends.append(backend)
    return backends


def requests(rng: Random, count: int) -> list[RequestFeatures]:
    """Return requests of several templates, lengths and temperatures, with prefixes for the prefix cache model."""
    return [
        RequestFeatures(
            "m",
            Endpoint.CHAT,
            temperature=rng.choice((0.0, 0.3, 0.7, 1.0)),
            overlap=rng.random() * 0.4,
            code_share=rng.random(),
            prompt_tokens=int(rng.lognormvariate(6, 1)),
            max_tokens=rng.choice((None, 256, 1024)),
            template=f"{rng.randrange(20):08x}",
            turns=rng.randrange(1, 5),
            workload=rng.choice(_WORKLOADS),
            prefix=tuple(rng.getrandbits(60) for _ in range(3)),
            prefix_tokens=(100, 300, 400),
        )
        for _ in range(count)
    ]


def outcome(request: RequestFeatures, decision: Decision, backend: Backend, rng: Random) -> Outcome:
    """Return a random outcome of a request."""
    tokens = max(9, int(rng.lognormvariate(5, 0.7)))
    per_step = 1.0 if backend.method is Method.BASELINE else 1.0 + 2 * rng.random()
    tpot_s = 0.012 / per_step
    return Outcome(
        request,
        decision,
        backend.method,
        200,
        0.05,
        tpot_s,
        0.05 + tpot_s * tokens,
        request.prompt_tokens,
        tokens,
        per_step,
        cached_tokens=100,
    )


def best_us(call: Callable[[], object], calls: int) -> float:
    """Return the CPU time per call in microseconds, the best of nine runs of `call`, which makes `calls` calls."""
    best_s = float("inf")
    for _ in range(9):
        began_s = time.thread_time()
        call()
        best_s = min(best_s, time.thread_time() - began_s)
    return 1e6 * best_s / calls


def main() -> None:
    """Print the table."""
    rng, backends = Random(7), pool()
    named = {backend.name: backend for backend in backends}
    policy = Learned(LearnedSettings())
    for request in requests(rng, 4000):
        decision = policy.choose(request, backends)
        policy.observe(outcome(request, decision, named[decision.backend], rng))
    fit = policy.maintenance()
    assert fit is not None
    began_s = time.process_time()
    fit()
    fitted_s = time.process_time() - began_s
    routed = requests(rng, _REQUESTS)
    keys = [key_of(request) for request in routed]
    results: list[tuple[Decision, Outcome]] = []

    def choose() -> None:
        for request in routed:
            policy.choose(request, backends)

    def observe() -> None:
        for _, result in results:
            policy.observe(result)

    def predictions() -> None:
        for request, key in zip(routed, keys, strict=True):
            policy.predictor.predict(request, key, backends)

    for request in routed:
        decision = policy.choose(request, backends)
        results.append((decision, outcome(request, decision, named[decision.backend], rng)))
    print("compiled" if str(predict_module.__file__).endswith(".so") else "not compiled")
    print(f"{'key_of':34} {best_us(lambda: list(map(key_of, routed)), _REQUESTS):7.1f}")
    print(f"{'predict, eight candidates':34} {best_us(predictions, _REQUESTS):7.1f}")
    print(f"{'choose':34} {best_us(choose, _REQUESTS):7.1f}")
    policy.explain_candidates = True
    print(f"{'choose, recorded':34} {best_us(choose, _REQUESTS):7.1f}")
    print(f"{'observe':34} {best_us(observe, _REQUESTS):7.1f}")
    print(f"{'fit, ms (with loading libraries)':34} {1e3 * fitted_s:7.1f}")
    policy.observe(results[0][1])
    refit = policy.maintenance()
    assert refit is not None
    print(f"{'fit, ms':34} {1e-3 * best_us(refit, 1):7.1f}")


if __name__ == "__main__":
    main()
