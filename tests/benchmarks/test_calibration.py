"""The arithmetic of the calibration report, and a made-up table processed from end to end."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from backends.calibration.calibration import Calibration, load_calibration
from backends.speculation import Method
from benchmarks.calibration import facts, sweeps
from benchmarks.calibration.arithmetic import Row, choice, rows_of, summarize
from benchmarks.calibration.cases import Case, Closed, Figure, Given, Group, LeftOut, Work, geometric_survival, parts
from benchmarks.calibration.document import as_csv, left_out_csv
from benchmarks.calibration.fit import as_yaml, fit
from benchmarks.calibration.held_out import crossing_point, crossings, tables
from benchmarks.calibration.play import Played, play
from benchmarks.calibration.run import Report, compare
from benchmarks.calibration.scripts import can_be_played, given_steps, scripts
from benchmarks.calibration.setups import setup
from benchmarks.calibration.texts import Texts

H100 = "llama-3.1-8b-h100"
GROUP = Group(H100, "made-up", "chat", "4")
LOAD, WORK = Closed(4, 24), Work("chat", prompt_tokens=100, output_tokens=60)
NO_TEXTS = Texts(Path("nowhere"))


def case(label: str, method: Method, k: int = 0, **more: object) -> Case:
    config = {"num_speculative_tokens": k} if k else {}
    return Case(GROUP, label, method, config, LOAD, WORK, **{"measured": {}, **more})  # type: ignore[arg-type]


def row(label: str, measured: float, simulated: float, group: Group = GROUP) -> Row:
    return Row("report", group, label, "speedup", measured, simulated, given=False)


def test_groups_of_a_setup_alternate_between_the_parts() -> None:
    groups = [Group("a", "s", "chat", load) for load in ("128", "8", "2/s", "offline", "32")]
    alone = Group("b", "s", "chat", "1")
    divided = parts([*groups, alone, alone])
    assert [divided[Group("a", "s", "chat", load)] for load in ("2/s", "8", "32", "128", "offline")] == [
        "fit", "report", "fit", "report", "fit"
    ]  # fmt: skip
    assert divided[alone] == "fit"


def curve(measured: dict[int, float], simulated: dict[int, float]) -> list[Row]:
    return [row("eagle", measured[load], simulated[load], GROUP._replace(load=str(load))) for load in measured]


def test_crossing_points_are_interpolated_and_compared() -> None:
    assert crossing_point([1, 4, 16], [2.0, 1.25, 0.8]) == pytest.approx(8.0)
    assert crossing_point([1, 4, 16], [0.9, 1.1, 0.5]) == pytest.approx(4 * 4 ** (np.log(1.1) / np.log(1.1 / 0.5)))
    assert crossing_point([1, 4, 16], [0.9, 0.8, 0.5]) == 1
    assert crossing_point([1, 4, 16], [0.9, 0.8, 1.0]) is None
    crossing = {1: 2.0, 4: 1.25, 16: 0.8}
    [found] = crossings(curve(crossing, {1: 2.0, 4: 1.5, 16: 1.1}))
    assert (found.measured, found.simulated, found.factor) == (pytest.approx(8.0), None, pytest.approx(2.0))
    assert crossings(curve({1: 2.0, 4: 1.5, 16: 1.1}, {1: 1.2, 4: 1.5, 16: 1.1})) == [], "both pay throughout"
    assert crossings(curve({1: 2.0, 16: 0.8}, {1: 2.0, 16: 0.9})) == [], "two points are no curve"


def test_held_out_errors_are_those_of_what_was_not_fitted() -> None:
    reported = [Row("report", GROUP, "eagle", "output_tok_s", 100.0, simulated, given=False) for simulated in (90, 105)]
    left_out = [Row("report", GROUP, "dspark k<=7", "output_tok_s", 100.0, 80.0, given=False)]
    lines = tables(reported, curve({1: 2.0, 4: 1.25, 16: 0.8}, {1: 2.0, 4: 1.0, 16: 0.8}), left_out).splitlines()
    assert "| made-up | the fitting part | 2 | 7.5% | 10% |" in lines
    assert "| made-up | no speculation and fixed k | 1 | 20.0% | 20% |" in lines
    assert "| all | 1 | 2.00 | 0 of 1 | 2.00 |" in lines


def test_sweeps_have_the_figures_of_their_sources() -> None:
    collected = sweeps.read()
    found = {(case.group.source, case.group.load, case.label): case for case in collected.cases}
    adaptive = found["vllm-52362", "256", "dspark k<=7"]
    assert (adaptive.config, adaptive.measured) == (
        {"num_speculative_tokens": 7, "enable_adaptive_verification": True},
        {"output_tok_s": 13324.67},
    )
    assert found["infera-74", "64", "dspark k=7"].config == {"num_speculative_tokens": 7}
    assert {"vllm-52362", "vllm-blog-2026-08", "infera-74"} == {case.group.source for case in collected.cases}
    assert [entry.source for entry in collected.left_out] == ["infera-74"]


@pytest.mark.parametrize(("accepted", "k"), [(0.0, 3), (0.4, 1), (1.08, 5), (4.9, 5)])
def test_geometric_survival_sums_to_the_accepted_tokens(accepted: float, k: int) -> None:
    survival = geometric_survival(accepted, k)
    assert sum(survival) == pytest.approx(accepted, abs=1e-6)
    assert len(survival) == k
    assert list(survival) == sorted(survival, reverse=True)


def test_more_accepted_than_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="of 3 drafted"):
        geometric_survival(3.2, 3)


def test_steps_have_the_given_acceptance() -> None:
    given = Given(share=0.5, survival=(0.8, 0.5, 0.1), drafted=3.0)
    emitted, drafted = given_steps(np.random.default_rng(1), given, 40_000)
    inner = slice(1, -10)
    assert emitted[inner].mean() == pytest.approx(given.tokens_per_step, rel=0.02)
    assert (drafted[inner] > 0).mean() == pytest.approx(0.5, abs=0.02)
    assert drafted[drafted > 0].mean() == pytest.approx(3.0, rel=0.02)
    assert (emitted <= drafted + 1).all()
    assert emitted[0] == emitted[-1] == 1


def test_speedups_are_relative_to_the_baseline() -> None:
    plain = case("baseline", Method.BASELINE, measured={"output_tok_s": 100.0})
    fast = case("eagle k=3", Method.EAGLE, 3, measured={"output_tok_s": 150.0})
    stated = case("dspark k=3", Method.DSPARK, 3, measured={"speedup": 1.2})
    lost = case("suffix", Method.SUFFIX, 8, measured={"output_tok_s": 140.0})
    simulated = {
        id(plain): {"output_tok_s": 200.0},
        id(fast): {"output_tok_s": 330.0},
        id(stated): {"output_tok_s": 240.0},
        id(lost): None,  # could not be played
    }
    rows = {(r.label, r.quantity): r for r in rows_of([plain, fast, stated, lost], simulated, "fit")}
    assert rows["eagle k=3", "speedup"].measured == pytest.approx(1.5)
    assert rows["eagle k=3", "speedup"].simulated == pytest.approx(1.65)
    assert rows["eagle k=3", "speedup"].error == pytest.approx(0.1)
    assert rows["eagle k=3", "output_tok_s"].error == pytest.approx(1.2)
    assert rows["dspark k=3", "speedup"].error == pytest.approx(0.0)
    assert set(rows) == {
        ("baseline", "output_tok_s"), ("eagle k=3", "output_tok_s"), ("eagle k=3", "speedup"), ("dspark k=3", "speedup")
    }  # fmt: skip


def test_for_times_less_is_faster() -> None:
    plain = case("baseline", Method.BASELINE, measured={"itl_median_ms": 5.0}, speed="itl_median_ms", inverse=True)
    slow = case("eagle k=5", Method.EAGLE, 5, measured={"itl_median_ms": 8.0}, speed="itl_median_ms", inverse=True)
    simulated = {id(plain): {"itl_median_ms": 6.0}, id(slow): {"itl_median_ms": 8.0}}
    speedup = [r for r in rows_of([plain, slow], simulated, "fit") if r.quantity == "speedup"]
    assert [(r.measured, r.simulated) for r in speedup] == [(0.625, 0.75)]


def test_a_group_with_two_baselines_is_refused() -> None:
    plain = case("baseline", Method.BASELINE)
    with pytest.raises(ValueError, match="at most one baseline"):
        rows_of([plain, case("again", Method.BASELINE)], {}, "fit")


def test_a_choice_is_judged_by_the_speed_it_loses() -> None:
    rows = [row("eagle k=3", 1.30, 1.5), row("eagle k=5", 1.34, 1.4), row("ngram k=5", 1.2, 1.1)]
    result = choice(rows)
    assert (result.chosen, result.best) == ("eagle k=3", "eagle k=5")
    assert result.lost == pytest.approx(0.04 / 1.34)
    assert choice([row("eagle k=3", 0.8, 0.9)]).chosen == "baseline"


def test_a_summary_counts_rows_groups_and_winners() -> None:
    other = GROUP._replace(load="8")
    rows = [
        row("eagle k=3", 1.30, 1.5), row("eagle k=5", 1.34, 1.4),  # nearly right, and the right method
        row("ngram k=5", 0.8, 1.1, other),  # wrong: it loses to the baseline
        Row("report", other, "ngram k=5", "step_ms", 1.0, 9.0, given=False),  # not a speedup
    ]  # fmt: skip
    summary = summarize(rows)
    assert (summary.rows, summary.groups, summary.winners, summary.nearly, summary.methods) == (3, 2, 0, 1, 1)
    assert summary.median_error == pytest.approx(1.5 / 1.3 - 1)
    assert summary.within_20 == pytest.approx(2 / 3)
    assert summarize([]).rows == 0


def played(of: Case, calibration: Calibration) -> Played:
    return play(of, calibration, scripts(of, calibration, NO_TEXTS, blind=False))


def test_fitting_finds_the_step_times_that_were_used() -> None:
    truth = load_calibration(H100)
    cases = [case("baseline", Method.BASELINE), *(case(f"eagle k={k}", Method.EAGLE, k) for k in (1, 3, 5))]
    measured = {id(c): played(c, truth).figures["output_tok_s"] for c in cases}
    plain = measured[id(cases[0])]
    known = [
        case(
            c.label, c.method, c.config.get("num_speculative_tokens", 0),
            measured={"output_tok_s": plain} if c.is_baseline else {"speedup": measured[id(c)] / plain},
        )
        for c in cases
    ]  # fmt: skip
    eagle = truth.method(Method.EAGLE)
    wrong = truth.model_copy(
        update={
            "step": truth.step.model_copy(update={"base_s": 9e-3}),
            "methods": truth.methods
            | {
                Method.EAGLE: eagle.model_copy(
                    update={"drafting": eagle.drafting.model_copy(update={"per_pass_s": 2e-3})}
                )
            },
        }
    )
    free = [(None, "base_s"), (Method.EAGLE, "per_pass_s")]
    fitted = fit(wrong, known, free, played)
    assert fitted.step.base_s == pytest.approx(truth.step.base_s, rel=0.05)
    assert fitted.method(Method.EAGLE).drafting.per_pass_s == pytest.approx(eagle.drafting.per_pass_s, rel=0.10)
    assert as_yaml(fitted, free).startswith("step:\n  base_s: 0.005")


def test_a_parameter_that_is_zero_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        fit(load_calibration(H100), [case("baseline", Method.BASELINE)], [(Method.EAGLE, "base_s")], played)


def test_methods_that_draft_from_the_text_need_a_text() -> None:
    calibration = load_calibration(H100)
    ngram = case("ngram k=5", Method.NGRAM, 5)
    assert not can_be_played(ngram, calibration, blind=False)
    given = case("ngram k=5", Method.NGRAM, 5, given=Given(0.3, (0.5,), 5))
    assert can_be_played(given, calibration, blind=False)
    assert not can_be_played(given, calibration, blind=True)


def test_step_times_of_another_engine_are_read() -> None:
    calibration = setup("sglang/Llama-3.1-8B-Instruct")
    assert set(calibration.methods) == {Method.BASELINE, Method.EAGLE3}
    assert not can_be_played(case("eagle3 k=3", Method.EAGLE3, 3), calibration, blind=True)
    with pytest.raises(ValueError, match="no step times of 'GPT-2'"):
        setup("sglang/GPT-2")


MADE_UP_ONLINE = """\
source,engine,hardware,target,workload,request_rate,temperature,method,k,ttft_median_ms,itl_median_ms,acceptance_rate
vllm-0.19-lab,v,1xH100,llama-3.1-8b-instruct,none,2,0,baseline,0,20,6.7,
vllm-0.19-lab,v,1xH100,llama-3.1-8b-instruct,none,2,0,eagle,5,30,10.3,0.2
"""


def test_a_table_becomes_rows(tmp_path: Path) -> None:
    (tmp_path / "serving_online.csv").write_text(MADE_UP_ONLINE, encoding="utf-8")
    collected = facts.online(tmp_path)
    assert [c.label for c in collected.cases] == ["baseline", "eagle k=5"]
    assert collected.cases[1].given is not None
    assert collected.cases[1].given.tokens_per_step == pytest.approx(2.0)

    # ShareGPT is not available here, so the runs have lengths of their own.
    cases = [case("baseline", Method.BASELINE, measured={"output_tok_s": 500.0})]
    cases.append(case("eagle k=3", Method.EAGLE, 3, measured={"output_tok_s": 700.0}, given=Given(1.0, (0.6,), 3)))
    report = compare(cases, NO_TEXTS)
    assert [r.label for r in report.rows if r.quantity == "speedup"] == ["eagle k=3"]
    blind = next(r for r in report.blind if r.quantity == "speedup")
    seen = next(r for r in report.rows if r.quantity == "speedup")
    assert seen.measured == blind.measured == pytest.approx(1.4)
    assert seen.simulated < blind.simulated  # the calibration's EAGLE accepts more than the 0.6 tokens given

    figures = [Figure("t", "w", "q", 2.0, 1.0)]
    lines = list(csv.DictReader(as_csv(report, figures, unlicensed=False).splitlines()))
    assert len(lines) == len(report.rows) + 1
    speedup = next(line for line in lines if line["quantity"] == "speedup")
    assert (speedup["source"], speedup["load"], speedup["method"]) == ("made-up", "4", "eagle k=3")
    assert (speedup["measured"], speedup["error"]) == ("1.4", f"{seen.error:+.4f}")
    assert speedup["blind_error"] == f"{blind.error:+.4f}"
    assert (lines[-1]["source"], lines[-1]["measured"], lines[-1]["error"]) == ("t", "2", "-0.5000")
    assert left_out_csv([LeftOut("t", "w", 3, "why, not")]) == 'source,what,rows,reason\nt,w,3,"why, not"\n'


def test_rows_without_a_licence_show_only_their_errors() -> None:
    group = GROUP._replace(source="vllm012")
    kept = dataclasses.replace(row("eagle k=3", 1.2345, 1.3, group), given=True)
    report = Report([kept], [kept], [])
    hidden = as_csv(report, [], unlicensed=False)
    assert f"report,{H100},vllm012,chat,4,eagle k=3,speedup,,,+0.0531,,+0.0531" in hidden
    assert "1.234" not in hidden
    assert "1.234" in as_csv(report, [], unlicensed=True)
