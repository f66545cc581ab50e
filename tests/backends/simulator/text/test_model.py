"""The simulated model gives equal requests equal answers, and copies text when asked to."""

from __future__ import annotations

from typing import Any

import pytest

from backends.calibration.calibration import Kind
from backends.drafting.ngram import ngram_replay
from backends.drafting.suffix import SuffixCache
from backends.simulator.text import model as text
from backends.simulator.text.model import Sampling, TargetModel, Writing
from backends.simulator.text.tokenizer import END_OF_TURN
from policies.learned.shadow_drafting import steps_of

GREEDY = Sampling(0.0)
SOURCE = "\n".join(
    f"def step_{index}(value, limit={index * 7}):\n    total = value * {index}\n    return min(total, limit)\n"
    for index in range(12)
)


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return text.load("a-model")


def ask(model: TargetModel, question: str, limit: int = 1000, **how: Any) -> Writing:
    return model.write(model.tokenizer.chat_prompt([{"role": "user", "content": question}]), GREEDY, limit, **how)


@pytest.mark.slow
def test_a_request_to_repeat_a_text_copies_it(model: TargetModel) -> None:
    answer = ask(model, f"Repeat this code exactly:\n```python\n{SOURCE}\n```", limit=4000)
    assert model.tokenizer.decode(answer.ids) == f"```python\n{SOURCE}\n```"
    assert answer.stopped
    assert answer.kind is Kind.CODE


def test_ngram_drafts_are_accepted_more_in_copies_than_in_chat(model: TargetModel) -> None:
    def tokens_per_step(question: str) -> float:
        prompt = model.tokenizer.chat_prompt([{"role": "user", "content": question}])
        ids = model.write(prompt, GREEDY, 400).ids
        emitted, _ = ngram_replay(prompt, ids, 5, 2, 4)
        return len(ids) / steps_of(emitted)

    copying = tokens_per_step(f"Repeat this code exactly:\n```python\n{SOURCE}\n```")
    chatting = [tokens_per_step(f"Tell me about {topic}.") for topic in ("rivers", "music", "closures", "trains")]
    assert copying > 4
    assert 1.0 <= sum(chatting) / len(chatting) < 2


@pytest.mark.slow
def test_a_suffix_tree_of_different_chats_does_not_come_to_know_the_next_one(model: TargetModel) -> None:
    """Of recorded chats it emits as many tokens per step late as early."""
    cache, per_step = SuffixCache(), []
    for number in range(300):
        question = f"What do people number {number} and {number**2} think about the subject {number * 7919 % 1000}?"
        prompt = model.tokenizer.chat_prompt([{"role": "user", "content": question}])
        ids = model.write(prompt, Sampling(0.7, seed=number), 180).ids
        emitted, _ = cache.replay(prompt, ids)
        per_step.append(len(ids) / steps_of(emitted))
    early, late = sum(per_step[:100]) / 100, sum(per_step[-100:]) / 100
    assert 1.05 < early < 1.7
    assert late < 1.1 * early


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("Hello, how are you?", Kind.CHAT),
        ("Write a Python function that reverses a list.", Kind.CODE),
        ("What is 17 * 23 + 4?", Kind.MATH),
        ("Summarize the following article: " + "It rained again. " * 30, Kind.SUMMARIZATION),
        ("Extract all names from this: Alice met Bob.", Kind.EXTRACTION),
        ("Translate to French: The cat sat on the mat, and the dog looked on.", Kind.TRANSLATION),
    ],
)
def test_kinds_are_recognised_from_the_words(model: TargetModel, question: str, kind: Kind) -> None:
    assert ask(model, question).kind is kind


def test_answers_respect_their_limits(model: TargetModel) -> None:
    cut = ask(model, "Hello there", limit=5)
    assert len(cut.ids) == 5
    assert not cut.stopped
    assert END_OF_TURN not in cut.ids
    whole = ask(model, "Hello there", limit=5000)
    assert whole.stopped
    assert whole.ids[-1] == END_OF_TURN
    endless = ask(model, "Hello there", limit=1500, least=1500)
    assert len(endless.ids) == 1500
    assert END_OF_TURN not in endless.ids
    long = ask(model, "Hello there", limit=1501, least=1500)
    assert long.ids == [*endless.ids, END_OF_TURN]
