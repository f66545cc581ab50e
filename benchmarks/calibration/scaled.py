"""How far calibrations scaled to another GPU are off: `python -m benchmarks.calibration scaled FACTS DATA`.

FACTS has throughput_offline.csv; DATA has transcribed/, vllm012_metrics/ and base_engines/. None but the last may be
copied. EAGLE heads: closed loops, simulated with step times of an H100 scaled to the GPU and with the acceptance of the
run. Base engines: TPOT of a setup from the constants of the same on another GPU.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from statistics import median

import numpy as np

from backends.calibration.base_engines import base_engines
from backends.calibration.calibration import Calibration
from backends.calibration.draft_profile import rates_to
from backends.calibration.load import load_calibration
from backends.calibration.scaling import scaled
from backends.drafting.script import Script, plain_steps
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks.calibration.base import Floats, read, tpot_ms
from benchmarks.virtual_time import run_closed_loop

_WORK = {"chat": (630, 190), "summarization": (2700, 200)}
"""Prompt and answer tokens of Apertus' workloads, from its summaries."""
_GUIDE = {"eagle": 31.1 / 17.49, "eagle3": 29.2 / 17.90}
"""Tokens a step of the guide's runs on ShareGPT: time between chunks over that between tokens."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop that was measured."""

    clients: int
    prompt: int
    answer: int
    requests: int = 0  # 0: four for each client


def tokens_per_s(calibration: Calibration, method: Method, k: int, survival: list[float], loop: Loop) -> float:
    """Return the throughput of a loop in which drafts are accepted as in the run."""
    rng = np.random.default_rng(1)
    config = {"num_speculative_tokens": k} if k else {}
    scripts = []
    for p, a in rng.uniform(0.5, 1.5, (loop.requests or 4 * loop.clients + 16, 2)):
        prompt, answer = int(loop.prompt * p), int(loop.answer * a)
        emitted, drafted = plain_steps(answer)
        if k:
            accepted = (rng.random((answer, 1)) < survival).sum(axis=1)
            emitted = np.minimum(1 + accepted, np.arange(answer, 0, -1)).astype(np.int32)
            drafted = np.full(answer, k, np.int32)
            emitted[0], drafted[0] = 1, 0
        scripts.append(Script(prompt, answer, emitted, drafted))
    return run_closed_loop(
        Fleet([SimulatedReplica("a", calibration, method, config)]), scripts, loop.clients
    ).tokens_per_s


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def apertus(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Yield errors of speedups and factors of crossing points on GH200."""
    there, own = scaled(load_calibration("llama-3.1-8b-h100"), "GH200"), load_calibration("llama-3.1-8b-gh200")
    plain: dict[tuple[str, int], float] = {}
    curves: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for row in rows(folder / "apertus8b_gh200_draft_length.csv"):
        if row["drafter"] != "eagle" or int(row["concurrency"]) > 128:  # beyond, the cache was full
            continue
        work, clients, k = row["workload"], int(row["concurrency"]), int(row["k"])
        loop = Loop(clients, *_WORK[work])
        if (work, clients) not in plain:
            plain[work, clients] = tokens_per_s(there, Method.BASELINE, 0, [], loop)
        rates = rates_to(Method.EAGLE, own.acceptance(Method.EAGLE, work).by_position, k)
        speed = tokens_per_s(there, Method.EAGLE, k, list(accumulate(rates, mul)), loop)
        curves.setdefault((work, k), {})[clients] = (float(row["throughput_vs_plain"]), speed / plain[work, clients])
    for curve in curves.values():
        yield from (("speedup of EAGLE on GH200", m, s) for m, s in curve.values())
        measured, simulated = (crossing({n: each[i] for n, each in curve.items()}) for i in (0, 1))
        if measured:
            yield "crossing of EAGLE on GH200", measured, simulated or np.inf
    for row in rows(folder / "apertus8b_gh200_plain_summarization_load.csv"):
        if (key := ("summarization", int(row["concurrency"]))) in plain:
            yield "tokens/s without on GH200", float(row["output_tok_s"]), plain[key]


def crossing(speedups: Mapping[int, float]) -> float | None:
    """Return the number of clients from which on a method gains nothing."""
    for (below, gain), (above, loss) in pairwise(speedups.items()):
        if gain >= 1 > loss:
            return below + (above - below) * (gain - 1) / (gain - loss)
    return None


def others(facts: Path, metrics: Path) -> Iterator[tuple[str, float, float]]:
    """Yield throughput and speedup of EAGLE and EAGLE-3 on L40S, and on a GPU not named that is taken for an A100."""
    l40s, loop = scaled(load_calibration("llama-3.1-8b-h100"), "L40S"), Loop(10, 220, 200, 200)
    of_guide = [
        r for r in rows(facts / "throughput_offline.csv") if (r["hardware"], r["workload"]) == ("1xL40S", "sharegpt")
    ]
    plain_there = next(float(r["output_tok_s"]) for r in of_guide if r["method"] == "baseline")
    plain = tokens_per_s(l40s, Method.BASELINE, 0, [], loop)
    yield "tokens/s without on L40S", plain_there, plain
    for row in of_guide:
        if row["method"] in _GUIDE:
            rate = (np.sqrt(4 * _GUIDE[row["method"]] - 3) - 1) / 2  # of which k=2 gives that many
            speed = tokens_per_s(l40s, Method(row["method"]), 2, [rate, rate**2], loop)
            yield "tokens/s of EAGLE, EAGLE-3 on L40S", float(row["output_tok_s"]), speed
            yield "speedup of EAGLE, EAGLE-3 on L40S", float(row["output_tok_s"]) / plain_there, speed / plain
    for model, source in (("L31-8B-I", "llama-3.1-8b-h100"), ("L31-70B-I", "llama-3.1-70b-4xh100")):
        a100, runs = scaled(load_calibration(source), "A100"), [r for r in rows(metrics) if r["model"] == model]
        for row in runs:
            if row["method"] == "autoregressive":
                number, base_there = float(row["requests"]), float(row["tok_s_per_request"])
                loop = Loop(
                    8, round(float(row["prompt_tokens"]) / number), round(float(row["gen_tokens"]) / number), 160
                )
                base = tokens_per_s(a100, Method.BASELINE, 0, [], loop)
            elif row["method"] == "eagle3":
                survival = [each / float(row["drafts"]) for each in json.loads(row["accepted_per_position"])]
                speed = tokens_per_s(a100, Method.EAGLE3, len(survival), survival, loop)
                yield (
                    f"speedup of EAGLE-3, taken for A100, {model}",
                    float(row["tok_s_per_request"]) / base_there,
                    speed / base,
                )
                yield f"tokens/s without, taken for A100, {model}", 8 * base_there, base
                yield f"tokens/s of EAGLE-3, taken for A100, {model}", 8 * float(row["tok_s_per_request"]), speed


def engines(table: Path) -> Iterator[tuple[str, float]]:
    """Yield errors of TPOT of base engines, with the constants of the same on another GPU or in another precision."""
    known = base_engines()
    for setup, cells in read(table).items():
        there = known.get(setup.name)
        if there is None or there.engine != f"{setup.engine} {setup.version}".strip():
            continue
        for here in known.values():
            if (here.model, here.gpus, parallel(here.name)) != (there.model, there.gpus, parallel(there.name)):
                continue
            differs = [
                word
                for word, new in (("GPU", here.gpu != there.gpu), ("precision", here.precision != there.precision))
                if new
            ]
            if len(differs) != 1:
                continue
            step = scaled(load_calibration(here.name), there.gpu, there.precision).step
            constants: Floats = 1e3 * np.array(
                [step.base_s, step.experts_s, step.per_token_below_knee_s, step.per_token_above_knee_s,
                 1e3 * step.per_context_token_s, step.no_graph_s, step.per_attended_s]
            )  # fmt: skip
            version = "same engine" if here.engine == there.engine else "its other versions"
            label = f"TPOT of base engines from another {differs[0]}, {version}"
            yield from ((label, float(e)) for e in tpot_ms(constants, step.expert_share, cells) / cells.tpot_ms - 1)


def parallel(name: str) -> str:
    """Return what a name says of parallelism and engine."""
    return name.rpartition("/")[2].partition("-")[2]


def errors(facts: Path, data: Path) -> Iterable[str]:
    """Yield what was compared, how often, the median error and the largest; of crossings, the factors."""
    found: dict[str, list[float]] = {}
    pairs = (*apertus(data / "transcribed"), *others(facts, data / "vllm012_metrics" / "summary.csv"))
    for what, measured, predicted in pairs:
        off = (
            max(measured, predicted) / min(measured, predicted) - 1 if "crossing" in what else predicted / measured - 1
        )
        found.setdefault(what, []).append(off)
    for what, off in engines(data / "base_engines" / "base_engines.csv.gz"):
        found.setdefault(what, []).append(off)
    for what, each in found.items():
        size = [abs(one) for one in each]
        if "crossing" in what:
            yield f"{what} | {len(each)} | factor {1 + median(size):.2f} | | {1 + max(size):.1f}"
        else:
            yield f"{what} | {len(each)} | {median(size):.1%} | {median(each):+.1%} | {max(size):.0%}"
