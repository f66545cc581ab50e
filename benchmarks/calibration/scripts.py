"""Scripts of the requests to play: from real texts if a method drafts from them, else from lengths and acceptance."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import Calibration
from backends.draft_schedule import draft_tokens
from backends.drafting.script import BLOCK_TOKENS, Script, Steps, plain_steps
from backends.simulator.drafting.acceptance import model_based_replay
from backends.simulator.drafting.proposers import Proposer
from backends.speculation import Method
from benchmarks.calibration.cases import Case, Given, Work
from benchmarks.calibration.texts import Texts

FROM_TEXT = (Method.NGRAM, Method.SUFFIX)


def can_be_played(case: Case, calibration: Calibration, *, blind: bool) -> bool:
    """Return whether acceptance for a case is known, `blind` to its run's own or not."""
    if case.is_baseline or (case.given is not None and not blind):
        return True
    if case.method in FROM_TEXT:
        return case.work.texts is not None
    entry = calibration.method(case.method)
    return bool(entry.acceptance) or entry.acceptance_like is not None


def scripts(case: Case, calibration: Calibration, texts: Texts, *, blind: bool) -> list[Script]:
    """Return the requests of a case.

    Parameters
    ----------
    blind
        Whether to take acceptance from the calibration or the text even if the run's own was measured.
    """
    rng = np.random.default_rng(11)
    given = None if blind else case.given
    count = case.load.requests
    if case.method in FROM_TEXT and given is None:
        return _from_texts(case, calibration, texts, count)
    k = draft_tokens(case.method, case.config)
    requests = []
    for prompt_tokens, output_tokens in _lengths(case.work, texts, count):
        if given is not None:
            steps = given_steps(rng, given, output_tokens)
        elif k:
            steps = model_based_replay(
                rng, calibration, case.method, k, case.temperature, case.work.kind, output_tokens
            )
        else:
            steps = plain_steps(output_tokens)
        requests.append(Script(prompt_tokens, output_tokens, *steps, prefix_blocks=_common(case.work, prompt_tokens)))
    return requests


def given_steps(rng: np.random.Generator, given: Given, output_tokens: int) -> Steps:
    """Return independent steps with the measured acceptance.

    Returns
    -------
    emitted, drafted
        int32, shape (output_tokens,); see `Script`.
    """
    emitted, drafted = plain_steps(output_tokens)
    left = np.arange(output_tokens, 0, -1)
    drafting = rng.random(output_tokens) < given.share
    drafting[0] = False  # the prefill's
    draws = rng.random(output_tokens)
    accepted = (draws[:, None] < np.asarray(given.survival)).sum(axis=1)
    rejected = max(0.0, given.drafted - sum(given.survival))
    extra = np.floor(rejected + rng.random(output_tokens)).astype(np.int64)
    emitted[drafting] = np.minimum(accepted + 1, left)[drafting]
    drafted[drafting] = np.maximum(accepted + extra, 1)[drafting]
    return emitted, drafted


def _lengths(work: Work, texts: Texts, count: int) -> list[tuple[int, int]]:
    if work.texts is not None and not work.output_tokens:
        pairs = texts.get(work.texts)
        return [(len(pairs[index % len(pairs)][0]), len(pairs[index % len(pairs)][1])) for index in range(count)]
    rng = np.random.default_rng(5)
    spreads = np.array([work.spread, work.spread if work.output_spread is None else work.output_spread])
    sizes = np.exp(spreads * rng.standard_normal((count, 2)) - spreads**2 / 2)
    sizes /= sizes.mean(axis=0)  # keep the source's means exactly
    return [
        (max(1, round(work.prompt_tokens * prompt)), max(2, round(work.output_tokens * output)))
        for prompt, output in sizes
    ]


def _from_texts(case: Case, calibration: Calibration, texts: Texts, count: int) -> list[Script]:
    """Return scripts of the real proposer, stretched to the case's lengths if it has any, as texts are stand-ins."""
    assert case.work.texts is not None
    proposer = Proposer(case.method, dict(case.config), calibration)
    pairs = texts.get(case.work.texts)
    played = [proposer.script(prompt, output, case.temperature, case.work.kind) for prompt, output in pairs[:count]]
    requests = []
    for index, (prompt_tokens, output_tokens) in enumerate(_lengths(case.work, texts, count)):
        steps = _stretched(played[index % len(played)], output_tokens)
        # Without the text's own blocks: a text may be used several times, which the measured run did not do.
        requests.append(Script(prompt_tokens, output_tokens, *steps, prefix_blocks=_common(case.work, prompt_tokens)))
    return requests


def _common(work: Work, prompt_tokens: int) -> tuple[int, ...]:
    """Return the blocks common to all prompts."""
    return tuple(range(int(work.shared * prompt_tokens) // BLOCK_TOKENS))


def _stretched(script: Script, output_tokens: int) -> Steps:
    """Return a script's steps for another answer length: cut, or repeated from the beginning."""
    positions = _positions(script.output_tokens, output_tokens)
    emitted, drafted = script.emitted[positions].copy(), script.drafted[positions].copy()
    np.minimum(emitted, np.arange(output_tokens, 0, -1, dtype=np.int32), out=emitted)
    emitted[0], drafted[0] = 1, 0
    return emitted, drafted


@cache
def _positions(available: int, needed: int) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], 1 + np.arange(needed - 1) % max(1, available - 1)])
