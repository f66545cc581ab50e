"""Measure the duration of distilling and the event loop's delay meanwhile: `python -m benchmarks.distill_pause`.

A learning policy observes requests of many templates and is then distilled in a thread, as in the gateway. Meanwhile a
task of the event loop wakes up every millisecond and measures how late it is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from random import Random

from backends.backend import Backend
from backends.speculation import Method
from policies.distill.distill import distill
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.length import LENGTH
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Outcome

_POOL = [
    Backend("plain", "m", Method.BASELINE, ""),
    Backend("lookup", "m", Method.NGRAM, "", 5),
    Backend("tree", "m", Method.SUFFIX, "", 24),
    Backend("head", "m", Method.EAGLE3, "", 3),
]
_WAKES_S = 0.001


def trained(requests: int, templates: int) -> Learned:
    """Return a policy that has observed requests whose template determines how well each backend drafts."""
    policy, rng, now_s = Learned(LearnedSettings(seed=0)), Random(0), 1e9
    policy.set_clock(lambda: now_s)
    for _ in range(requests):
        template = rng.randrange(templates)
        request = RequestFeatures(
            "m",
            Endpoint.CHAT,
            temperature=rng.choice((0.0, 0.7)),
            overlap=rng.random() ** 3,
            prompt_tokens=rng.randint(40, 900),
            template=f"{template:08x}",
        )
        decision = policy.choose(request, _POOL)
        method = next(candidate.method for candidate in _POOL if candidate.name == decision.backend)
        gain = Random(f"{template} {method}").uniform(1.0, 4.0)
        per_step = 1.0 if method is Method.BASELINE else max(1.0, gain * rng.lognormvariate(0.0, 0.1))
        tokens, tpot_s = int(rng.lognormvariate(5.0, 0.5)) + 8, 0.009 / per_step
        now_s += 0.01
        took_s = 0.02 + tpot_s * tokens
        policy.observe(Outcome(request, decision, method, 200, 0.02, tpot_s, took_s, 100, tokens, per_step))
    return policy


async def measure(policy: Learned, times: int) -> None:
    """Distil several times, and print the event loop's delays."""
    late_s: list[float] = []

    async def wake() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(_WAKES_S)
            now_s = time.perf_counter()
            late_s.append(now_s - last_s - _WAKES_S)
            last_s = now_s

    waking = asyncio.create_task(wake())
    await asyncio.sleep(1.0)
    print(
        f"not distilling: median delay {1e3 * sorted(late_s)[len(late_s) // 2]:.1f} ms, maximum {1e3 * max(late_s):.1f}"
    )
    for _ in range(times):
        late_s.clear()
        began_s = time.perf_counter()
        await asyncio.to_thread(distill, policy, _POOL)
        took_s = time.perf_counter() - began_s
        median_s = sorted(late_s)[len(late_s) // 2]
        print(f"distilled in {took_s:.2f} s: median delay {1e3 * median_s:.1f} ms, maximum {1e3 * max(late_s):.1f}")
    waking.cancel()


def main() -> None:
    """Train a policy and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--templates", type=int, default=4_000)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    policy = trained(arguments.requests, arguments.templates)
    policy.warm_up()  # as at the gateway's start
    gc.collect()
    gc.freeze()
    print(f"{len(policy.statistics.buckets(LENGTH))} buckets of length")
    asyncio.run(measure(policy, arguments.times))


if __name__ == "__main__":
    main()
