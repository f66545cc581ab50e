"""Requests to play: from real texts where a method drafts from them, otherwise from lengths and acceptance."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import Calibration
from backends.calibration.parameters import draft_tokens
from backends.drafting.script import BLOCK_TOKENS, Script, Steps, plain_steps
from backends.simulator.drafting.acceptance import model_based_replay
from backends.simulator.drafting.proposers import Proposer
from backends.speculation import Method
from benchmarks.calibration.cases import Case, Given, Work
from benchmarks.calibration.texts import Texts

FROM_TEXT = (Method.NGRAM, Method.SUFFIX)


def can_be_played(case: Case, calibration: Calibration, *, blind: bool) -> bool:
    """Return whether there is acceptance for a case; `blind` to what was measured in its run, or not."""
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
        Whether to draw acceptance from the calibration or the text even where the run's own was measured.
    """
    rng = np.random.default_rng(11)
    given = None if blind else case.given
    count = case.load.requests
    if case.method in FROM_TEXT and given is None:
        return _from_texts(case, calibration, texts, count)
    k = draft_tokens(case.method, case.config)
    made = []
    for prompt_tokens, output_tokens in _lengths(case.work, texts, count):
        if given is not None:
            steps = given_steps(rng, given, output_tokens)
        elif k:
            steps = model_based_replay(
                rng, calibration, case.method, k, case.temperature, case.work.kind, output_tokens
            )
        else:
            steps = plain_steps(output_tokens)
        made.append(Script(prompt_tokens, output_tokens, *steps, prefix_blocks=_common(case.work, prompt_tokens)))
    return made


def given_steps(rng: np.random.Generator, given: Given, output_tokens: int) -> Steps:
    """Return steps that accept what was measured, each independent of the others.

    Returns
    -------
    emitted, drafted
        int32, shape (output_tokens,); see `Script`.
    """
    emitted, drafted = plain_steps(output_tokens)
    left = np.arange(output_tokens, 0, -1)
    drafting = rng.random(output_tokens) < given.share
    drafting[0] = False  # the prefill's
    luck = rng.random(output_tokens)
    accepted = (luck[:, None] < np.asarray(given.survival)).sum(axis=1)
    rejected = max(0.0, given.drafted - sum(given.survival))
    extra = np.floor(rejected + rng.random(output_tokens)).astype(np.int64)
    emitted[drafting] = np.minimum(accepted + 1, left)[drafting]
    drafted[drafting] = np.maximum(accepted + extra, 1)[drafting]
    return emitted, drafted


def _lengths(work: Work, texts: Texts, count: int) -> list[tuple[int, int]]:
    if work.texts is not None and not work.output_tokens:
        known = texts.get(work.texts)
        return [(len(known[i % len(known)][0]), len(known[i % len(known)][1])) for i in range(count)]
    rng = np.random.default_rng(5)
    sizes = np.exp(work.spread * rng.standard_normal((count, 2)) - work.spread**2 / 2)
    sizes /= sizes.mean(axis=0)  # the means are the source's, whatever was drawn
    return [
        (max(1, round(work.prompt_tokens * prompt)), max(2, round(work.output_tokens * output)))
        for prompt, output in sizes
    ]


def _from_texts(case: Case, calibration: Calibration, texts: Texts, count: int) -> list[Script]:
    """Run the proposer itself. The steps go over the case's lengths where it has some: texts are stand-ins there."""
    assert case.work.texts is not None
    proposer = Proposer(case.method, dict(case.config), calibration)
    known = texts.get(case.work.texts)
    played = [proposer.script(prompt, output, case.temperature, case.work.kind) for prompt, output in known[:count]]
    made = []
    for index, (prompt_tokens, output_tokens) in enumerate(_lengths(case.work, texts, count)):
        steps = _stretched(played[index % len(played)], output_tokens)
        # Not the text's own blocks: it may come more than once, which says nothing of what was measured.
        made.append(Script(prompt_tokens, output_tokens, *steps, prefix_blocks=_common(case.work, prompt_tokens)))
    return made


def _common(work: Work, prompt_tokens: int) -> tuple[int, ...]:
    """Return the blocks that all prompts begin with."""
    return tuple(range(int(work.shared * prompt_tokens) // BLOCK_TOKENS))


def _stretched(script: Script, output_tokens: int) -> Steps:
    """Return a script's steps for an answer of another length: cut, or repeated from the beginning."""
    at = _positions(script.output_tokens, output_tokens)
    emitted, drafted = script.emitted[at].copy(), script.drafted[at].copy()
    np.minimum(emitted, np.arange(output_tokens, 0, -1, dtype=np.int32), out=emitted)
    emitted[0], drafted[0] = 1, 0
    return emitted, drafted


@cache
def _positions(known: int, wanted: int) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], 1 + np.arange(wanted - 1) % max(1, known - 1)])
