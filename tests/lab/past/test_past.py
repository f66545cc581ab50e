"""Step times that are found again in what replicas served, and the replay of the past that shows their error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from backends.backend import Candidate
from backends.calibration.batch_schedule import decode_step_s
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from gateway.config.load import load_pool
from lab.past.check import past_of
from lab.past.pool import simulated_pool
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import replay_request
from lab.simulation.simulate import replay
from lab.simulation.table import request_table
from lab.trace.record import SpeculationRecord, TraceRecord
from lab.trace.write import write_trace
from policies.balancing.least_loaded import LeastLoaded
from policies.features.request import RequestFeatures
from policies.load_policy import LoadSettings
from policies.policy import Decision, Outcome
from policies.roles import Learner
from tests.lab.invoked import figures, refused, run
from tests.support.report import ReportPage

LIKE = "llama-3.1-8b-h100"
REPLICAS = {
    "plain": (Method.BASELINE, {}),
    "lookup": (Method.NGRAM, {"num_speculative_tokens": 5}),
    "head": (Method.EAGLE3, {"num_speculative_tokens": 3}),
}
POOL = """\
models:
  m:
    policy: {name: least_loaded, seed: 1}
    backends:
      plain: {method: baseline, url: "http://10.0.0.1:8000"}
      lookup: {method: ngram, url: "http://10.0.0.2:8000", speculative_config: {num_speculative_tokens: 5}}
      head: {method: eagle3, url: "http://10.0.0.3:8000", speculative_config: {num_speculative_tokens: 3}}
"""


class Watched(LeastLoaded, Learner):
    """Keeps what became of each request, by its template."""

    reads_requests = True

    def __init__(self) -> None:
        super().__init__(LoadSettings(seed=1))
        self.outcomes: dict[str, Outcome] = {}

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: object = None) -> Decision:
        return super().choose(request, candidates)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes[outcome.request.template] = outcome


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A calibration that nobody is told of: three times as slow, with other slopes."""
    document = load_calibration(LIKE).model_dump(mode="json", exclude_defaults=True, exclude={"name", "methods_from"})
    factors = {"per_context_token_s": 12.0, "per_token_above_knee_s": 6.0}
    costs = [document["step"], *(each["drafting"] for each in document["methods"].values())]
    for group in costs:
        group |= {name: factors.get(name, 3.0) * value for name, value in group.items() if name.endswith("_s")}
    path = tmp_path_factory.mktemp("hidden") / "hidden.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def recorded(calibration: str, count: int, rate: float, *, whole: bool = False) -> list[TraceRecord]:
    """Return what a gateway records of a pool with a calibration, at four levels of load."""
    rng = np.random.default_rng(0)
    rates = rate * (0.3 + 1.4 * (np.arange(count) * 8 // count % 4) / 3)
    at_s = 1.7e9 + np.cumsum(rng.exponential(1 / rates))
    sizes = zip(
        at_s.tolist(), rng.integers(50, 1500, count).tolist(), rng.integers(20, 300, count).tolist(), strict=True
    )
    asked = [
        TraceRecord(
            f"{number}", at, template=f"{number:08x}", temperature=0.0, workload="chat", prompt_tokens=prompt,
            output_tokens=output,
        )
        for number, (at, prompt, output) in enumerate(sizes)
    ]  # fmt: skip
    pool = [ReplicaSpec(name, method, config, calibration) for name, (method, config) in REPLICAS.items()]
    watched = Watched()
    replay(pool, [replay_request(one, (one.arrived_at or 0.0) - at_s[0], 0.0) for one in asked], watched, seed=0)
    return [_record(one, watched.outcomes[one.template], whole=whole) for one in asked]


def _record(asked: TraceRecord, outcome: Outcome, *, whole: bool) -> TraceRecord:
    later = outcome.output_tokens - 1
    per_step = outcome.output_tokens / (later / (outcome.tokens_per_step or 1.0) + 1)
    return replace(
        asked,
        template="",
        backend=outcome.decision.backend,
        method=outcome.method.value,
        status=200,
        ttft_s=None if whole else outcome.ttft_s,
        e2e_s=outcome.e2e_s,
        spec=SpeculationRecord(tokens_per_step=per_step),
        acceptance={outcome.method.value: per_step},
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "whole"), [(6.0, True), (25.0, False)], ids=["whole", "overload"])
def test_step_times_are_found_again_in_what_was_recorded(hidden: str, config: Path, rate: float, whole: bool) -> None:
    """Also of answers in one piece, which have no time to the first token, and of a pool that cannot keep up."""
    [served] = load_pool(config).models.values()
    with request_table(recorded(hidden, 1500, rate, whole=whole), 0.0) as requests:
        past = past_of(simulated_pool(served, requests), requests)
        assert [one.name for one in past.replicas] == list(REPLICAS)
        assert past.error is not None
        assert past.error < 0.05
        if rate > 10.0:
            return
        batches = np.array([1.0, 4.0, 8.0, 16.0])
        for one in past.pool.replicas:
            ours, truth = (
                decode_step_s(
                    parameters := EngineParameters.of(load_calibration(name), one.method, one.config),
                    batches, parameters.k if one.method is Method.EAGLE3 else 0, 900.0,
                )
                for name in (one.calibration, hidden)
            )  # fmt: skip
            assert ours == pytest.approx(truth, rel=0.12)


@pytest.mark.slow
def test_the_error_stands_beside_each_result(hidden: str, config: Path, tmp_path: Path) -> None:
    trace, page, rules = (tmp_path / name for name in ("t.jsonl", "p.html", "rules.yaml"))
    write_trace(trace, recorded(hidden, 400, 6.0))
    given = (trace, "--config", config)
    printed, document = figures("replay", tmp_path, *given, "--policy", "least_loaded", "--report", page)
    assert printed.startswith("Step times of plain: fitted to half of ")
    assert document["past"]["error"] < 0.10
    assert document["verdict"].endswith(document["past"]["said"])
    assert "% in the time to the first token of " in document["past"]["said"]
    assert set(document["past"]["replicas"]) == set(REPLICAS)
    shown = ReportPage(page.read_text("utf-8"))
    assert [row[0] for row in shown.tables["recorded"][1:]] == list(REPLICAS)
    assert document["past"]["said"] in shown.text

    # Another machine's step times: said first, and wherever a result is kept.
    code, printed, _ = run("tune", *given, "--calibration", LIKE, "--out", rules, "--trials", 1, "--replications", 0)
    assert code == 0
    assert "\nNot to be relied on: a replay of the past is off by at most -" in printed
    assert "# Not to be relied on: a replay of the past is off by at most -" in rules.read_text()
    assert f"# Step times of plain, lookup, head: {LIKE}." in rules.read_text()


@pytest.mark.slow
def test_a_plan_goes_by_what_was_recorded_of_the_present_pool(hidden: str, config: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "plan.yaml"
    write_trace(trace, recorded(hidden, 600, 6.0))
    few = ("--method", "baseline", "--method", "eagle3=3", "--jobs", 1, "--limit", 140)
    given = (trace, "--replicas", 2, "--config", config, *few, "--out", out)
    printed, plan = figures("plan", tmp_path, *given, "--calibration", LIKE)
    assert plan["past"]["error"] < 0.10
    assert plan["verdict"].endswith(plan["past"]["said"])
    assert f"# {plan['verdict']}" in out.read_text()
    assert "--max-model-len" not in printed  # the engine's own is the longest
    slow, true = (next(one for one in plan["mixes"] if one["mix"] == "2x baseline")["tpot_s"], 3.0 * 0.0075)
    assert slow > true
    assert len(load_pool(out).models["m"].backends) == 2


@pytest.mark.slow
def test_k_by_load_goes_by_step_times_fitted_to_records(hidden: str, config: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "k.yaml"
    write_trace(trace, recorded(hidden, 300, 6.0))
    code, _, error = run("tune", trace, "--config", config, "--out", out, "--schedule")
    assert code == 0, error
    assert list(yaml.safe_load(out.read_text())["backends"]) == ["head"]


@pytest.mark.slow
def test_replicas_of_which_nothing_is_known_need_a_calibration(hidden: str, config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    known = recorded(hidden, 300, 6.0)
    write_trace(trace, [replace(one, backend="", method="") for one in known])
    error = refused("replay", trace, "--config", config)
    assert "--calibration: the trace has no times of plain, lookup, head" in error
    assert run("replay", trace, "--config", config, "--calibration", LIKE)[0] == 0
    write_trace(trace, known[:5])
    error = refused("replay", trace, "--config", config)
    assert "--calibration: the trace has times of only 5 requests of plain, lookup, head" in error
    write_trace(trace, known[:20])
    assert "not known: the trace has too few times of these replicas." in run("replay", trace, "--config", config)[1]
    # A replica that has served nothing has what the others show, and it is said that nothing of it was compared.
    write_trace(trace, [one for one in known if one.backend == "plain"])
    code, printed, _ = run("replay", trace, "--config", config)
    assert code == 0
    count = sum(one.backend == "plain" for one in known)
    assert printed.startswith(
        f"Step times of plain, lookup, head: fitted to half of {count} recorded requests of plain, "
    )
    assert "eagle3 were not measured here: they are llama-3.1-8b-h100's." in printed
    assert " For lookup, head it is not known: the trace has too few of their times." in printed


def test_acceptance_is_as_recorded_where_a_request_did_not_go() -> None:
    def record(number: int, template: str, method: str, per_step: float) -> TraceRecord:
        return TraceRecord(
            f"{number}", float(number), template=template, prompt_tokens=9, output_tokens=50, backend=method,
            method=method, status=200, e2e_s=1.0, acceptance={method: per_step},
            spec=SpeculationRecord(tokens_per_step=per_step),
        )  # fmt: skip

    records = [record(n, "aa" if n % 2 else "bb", ("eagle3", "ngram")[n // 2 % 2], 1.5 + n % 2) for n in range(40)]
    with request_table([*records, TraceRecord("x", 50.0, prompt_tokens=9, output_tokens=50)], 0.0) as table:
        requests = list(table)
    for number, request in enumerate(requests[:40]):
        assert request.acceptance == {"eagle3": 1.5 + number % 2, "ngram": 1.5 + number % 2}
    assert set(requests[40].acceptance) == {"eagle3", "ngram"}  # of any of them
