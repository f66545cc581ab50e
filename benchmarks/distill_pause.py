"""How long distilling takes, and how late the event loop is meanwhile: `python -m benchmarks.distill_pause`.

A learning policy is shown requests of so many templates, then distilled in a thread, as the gateway does it; a task of
the same loop wakes every millisecond meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from random import Random

from backends.speculation import Method
from lab.evaluate.log import LoggedCandidate
from policies.distill.distill import distill
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.length import LENGTH
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Outcome

_POOL = [
    LoggedCandidate("plain", Method.BASELINE),
    LoggedCandidate("lookup", Method.NGRAM, 5),
    LoggedCandidate("tree", Method.SUFFIX, 24),
    LoggedCandidate("head", Method.EAGLE3, 3),
]
_WAKES_S = 0.001


def trained(requests: int, templates: int) -> Learned:
    """Return a policy that has seen requests whose template decides how well each backend drafts."""
    policy, rng, now_s = Learned(LearnedSettings(seed=0)), Random(0), 1e9
    policy.set_clock(lambda: now_s)
    for _ in range(requests):
        template = rng.randrange(templates)
        asked = RequestFeatures(
            "m",
            Endpoint.CHAT,
            temperature=rng.choice((0.0, 0.7)),
            overlap=rng.random() ** 3,
            prompt_tokens=rng.randint(40, 900),
            template=f"{template:08x}",
        )
        decision = policy.choose(asked, _POOL)
        method = next(one.method for one in _POOL if one.name == decision.backend)
        gain = Random(f"{template} {method}").uniform(1.0, 4.0)
        per_step = 1.0 if method is Method.BASELINE else max(1.0, gain * rng.lognormvariate(0.0, 0.1))
        tokens, tpot_s = int(rng.lognormvariate(5.0, 0.5)) + 8, 0.009 / per_step
        now_s += 0.01
        took_s = 0.02 + tpot_s * tokens
        policy.observe(Outcome(asked, decision, method, 200, 0.02, tpot_s, took_s, 100, tokens, per_step))
    return policy


async def measured(policy: Learned, times: int) -> None:
    """Distil several times, and print how late the loop was."""
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
    print(f"without: late by {1e3 * sorted(late_s)[len(late_s) // 2]:.1f} ms, at most {1e3 * max(late_s):.1f}")
    for _ in range(times):
        late_s.clear()
        began_s = time.perf_counter()
        await asyncio.to_thread(distill, policy, _POOL)
        took_s = time.perf_counter() - began_s
        middle_s = sorted(late_s)[len(late_s) // 2]
        print(f"distilled in {took_s:.2f} s: late by {1e3 * middle_s:.1f} ms, at most {1e3 * max(late_s):.1f}")
    waking.cancel()


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--templates", type=int, default=4_000)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    policy = trained(arguments.requests, arguments.templates)
    policy.warm_up()  # as the gateway does at its start
    gc.collect()
    gc.freeze()
    print(f"{len(policy.statistics.cells(LENGTH))} cells")
    asyncio.run(measured(policy, arguments.times))


if __name__ == "__main__":
    main()
