"""`gateway calibrate`: a machine is found again from loops that were played on it, and by a machine unlike it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.calibration.calibration import Kind
from backends.calibration.load import load_calibration
from backends.speculation import Method
from gateway.config.load import load_pool
from lab.calibrate.command import played
from lab.past.fit import fitted
from lab.past.served import EACH, ServedPart
from tests.lab import invoked

TRUE, LIKE = "llama-3.1-8b-h100", "llama-3.1-8b-l40s"
DRAFTS = {Method.BASELINE: (0, 1.0, 0.0), Method.NGRAM: (5, 1.2, 0.5), Method.EAGLE3: (3, 2.2, 3.0)}
BY_POSITION = [0.6, 0.36, 0.18]
KV_TOKENS = 100_000
POOL = """
models:
  m:
    policy: {name: learned, calibration: mine.yaml}
    backends:
      plain: {method: baseline, simulate: {calibration: mine.yaml}}
      head: {method: eagle3, simulate: {calibration: mine.yaml}, speculative_config: {num_speculative_tokens: 3}}
"""


def config(k: int) -> dict[str, int]:
    return {"num_speculative_tokens": k} if k else {}


def loop(method: Method, concurrency: int, cached_share: float = 0.0) -> ServedPart:
    """Return a closed loop with the times of the true machine."""
    k, per_step, drafted = DRAFTS[method]
    random, count = np.random.default_rng(concurrency), max(24, 6 * concurrency)
    prompts, answers = random.integers(100, 1500, count).astype(float), random.integers(60, 260, count).astype(float)
    steps, nothing = np.maximum(5.0, 1 + np.round((answers - 1) / per_step)), np.zeros(count)
    asked = ServedPart(
        method=method, config=config(k), concurrency=concurrency, sent_s=nothing, prompt_tokens=prompts,
        cached_tokens=np.floor(cached_share * prompts), output_tokens=answers, steps=steps, ttft_s=nothing,
        e2e_s=nothing, drafted=drafted,
    )  # fmt: skip
    times = played(asked, TRUE)
    return replace(asked, sent_s=times.arrived_s, ttft_s=times.ttft_s, e2e_s=times.e2e_s)


def document(loops: list[ServedPart]) -> dict[str, Any]:
    """Return what `gateway replay --live --json` writes of closed loops."""
    written = []
    for one in loops:
        k, per_step, drafted = DRAFTS[one.method]
        rate = (per_step - 1) / drafted if drafted else 0.0
        accepted = {"rate": rate, "tokens_per_step": per_step, "by_position": [*BY_POSITION, 0.09, 0.04][:k]}
        written.append(
            {
                "endpoint": one.method.value,
                "method": one.method.value,
                "concurrency": one.concurrency,
                "temperature": 0.0,
                "kv_tokens": KV_TOKENS,
                "acceptance": accepted if k else None,
                "each": {name: getattr(one, name).tolist() for name in EACH},
            }
        )
    return {"loops": written}


run = partial(invoked.run, "calibrate")


@pytest.mark.slow
def test_a_machine_is_found_again_by_one_unlike_it(tmp_path: Path) -> None:
    loops = [loop(method, concurrency) for method in DRAFTS for concurrency in (1, 8, 32)]
    measured, out = tmp_path / "loops.json", tmp_path / "mine.yaml"
    measured.write_text(json.dumps(document(loops)))
    given = (f"code={measured}", "--out", out, "--hardware", "2x mine", "--like", LIKE)
    status, printed, error = run(*given)
    assert (status, error) == (0, "")
    assert "Fitted to 1, 32 at once, the TPOT at 8 is off by " in printed
    assert printed.splitlines()[0] in out.read_text()
    mine = load_calibration(str(out))
    for one in loops:
        ours, theirs = played(one, str(out)), played(one, LIKE)
        assert np.median(theirs.tpot_s) > 2.5 * np.median(one.tpot_s)
        assert np.median(ours.tpot_s) == pytest.approx(np.median(one.tpot_s), rel=0.07)
        assert np.median(ours.ttft_s) == pytest.approx(np.median(one.ttft_s), rel=0.11)
    assert mine.kv_tokens(Method.BASELINE) == pytest.approx(KV_TOKENS, abs=16)
    assert mine.memory.utilization == 0.9  # with which `gateway plan` starts its replicas
    assert (mine.hardware, mine.target) == ("2x mine", load_calibration(LIKE).target)
    (premise,) = mine.premises([Method.EAGLE3])
    assert "on 2x mine, measured with `gateway calibrate` at 1 to 32 requests at once; off by " in premise
    assert premise.endswith("figures held out.")
    assert mine.premises([Method.EAGLE, Method.NGRAM])[1].startswith("Drafting times and acceptance of eagle were not ")
    # What was counted is of code; text of other kinds, and methods that were not measured, are as there.
    reached = np.cumprod(mine.acceptance(Method.EAGLE3, "code").by_position)
    assert reached == pytest.approx(BY_POSITION, rel=0.1)
    like = load_calibration(LIKE)
    assert mine.acceptance(Method.EAGLE3, Kind.MATH) == like.acceptance(Method.EAGLE3, Kind.MATH)
    assert mine.method(Method.EAGLE).drafting.per_pass_s < 0.5 * like.method(Method.EAGLE).drafting.per_pass_s
    (tmp_path / "pool.yaml").write_text(POOL)
    backends = load_pool(tmp_path / "pool.yaml").models["m"].backends
    assert {one.simulate.calibration for one in backends.values() if one.simulate} == {str(out)}


@pytest.mark.slow
@pytest.mark.parametrize("cached_share", [0.0, 0.9])
def test_what_prompts_take_is_found_where_most_of_them_is_cached(cached_share: float) -> None:
    loops = [loop(Method.BASELINE, concurrency, cached_share) for concurrency in (1, 8, 32)]
    found = fitted(loops, load_calibration(LIKE))["step"]["per_token_above_knee_s"]
    assert found == pytest.approx(load_calibration(TRUE).step.per_token_above_knee_s, rel=0.1)


@pytest.mark.slow
def test_what_is_held_out_may_have_longer_prompts_but_must_fit(tmp_path: Path) -> None:
    loops = [loop(Method.BASELINE, concurrency) for concurrency in (1, 4)]
    measured, out = tmp_path / "loops.json", tmp_path / "mine.yaml"
    given = (measured, "--out", out, "--hardware", "1x mine")
    for tokens, status, said in ((150_000.0, 0, "the TPOT at 4 is off by"), (1e6, 2, "do not fit into its memory")):
        loops[1] = replace(loops[1], prompt_tokens=np.full(len(loops[1].steps), tokens))
        measured.write_text(json.dumps(document(loops)).replace(f'"kv_tokens": {KV_TOKENS}', '"kv_tokens": 0'))
        found, printed, error = run(*given)
        assert found == status
        assert said in printed + error
        assert "nan" not in printed


@pytest.mark.slow
def test_each_position_is_that_of_the_loops_that_draft_it() -> None:
    longer = replace(loop(Method.EAGLE3, 1), by_position=tuple(BY_POSITION), kind=Kind.CODE, temperature=0.0)
    shorter = replace(longer, config=config(1), by_position=(0.5,))
    alone, both = (fitted(loops, load_calibration(TRUE)) for loops in ([longer], [longer, shorter]))
    first, *others = both["methods"]["eagle3"]["acceptance"]["code"]["by_position"]
    known, *same = alone["methods"]["eagle3"]["acceptance"]["code"]["by_position"]
    assert first == pytest.approx(known - 0.05, abs=0.01)
    assert others == same


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (None, "", "cannot read it: No such file"),
        ("{", "", "is not what `gateway replay --live --json` writes"),
        ('{"loops": []}', "", "replay with --concurrency"),
        ("{}", "prose=", "no kind of text is called 'prose'; the kinds are chat, code"),
    ],
)
def test_what_cannot_be_used_exits_2_with_the_reason(
    tmp_path: Path, content: str | None, kind: str, message: str
) -> None:
    path = tmp_path / "loops.json"
    if content is not None:
        path.write_text(content)
    given = (f"{kind}{path}", "--out", tmp_path / "mine.yaml", "--hardware", "mine")
    assert message in invoked.refused("calibrate", *given)
    assert not (tmp_path / "mine.yaml").exists()
