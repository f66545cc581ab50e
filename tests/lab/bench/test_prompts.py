from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from backends.validation import UsageError
from lab.bench.arrivals import Arrival
from lab.bench.datasets import read_dataset, token_counter
from lab.bench.prompts import KINDS, Prompt, RequestFormat, TokenScale, synthetic_text
from lab.bench.settings import BenchSettings, read_settings
from lab.bench.workload import Load, Workload
from policies.features.tail import overlap_of_text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [20, 100, 1000])
def test_a_prompt_has_the_requested_number_of_words(kind: str, words: int) -> None:
    assert len(synthetic_text(kind, Random(1), words).split()) == words


def test_only_the_repeating_kind_repeats_itself() -> None:
    share = {kind: overlap_of_text(synthetic_text(kind, Random(1), 400)) for kind in KINDS}
    assert share["repeating"] > 0.5
    assert share["random"] < 0.05
    assert share["copy"] < 0.05


def test_the_scale_inverts_the_engine_s_token_counts() -> None:
    scale = TokenScale.through((32, 11 + 40), (256, 11 + 320))
    assert (scale.fixed, scale.per_word, scale.measured) == (pytest.approx(11), pytest.approx(1.25), True)
    assert scale.words(511) == 400
    assert scale.words(3) == 1


def test_counts_that_do_not_increase_are_ignored() -> None:
    assert TokenScale.through((32, 7), (256, 7)) == TokenScale()


def settings_of(**given: object) -> BenchSettings:
    return read_settings(url=("http://127.0.0.1:1",), **given)


def workload(cell: int = 0, **given: object) -> Workload:
    load = Load("concurrency", 2)
    return Workload(settings_of(concurrency="2", **given), load, cell, scale=TokenScale())


def test_prompts_depend_only_on_seed_and_cell() -> None:
    texts = [workload().prompt(index).text for index in range(5)]
    assert texts == [workload().prompt(index).text for index in range(5)]
    assert not set(texts) & {workload(seed=1).prompt(index).text for index in range(5)}
    assert not set(texts) & {workload(1).prompt(index).text for index in range(5)}
    assert workload().prompt(-1).text not in texts


def test_lengths_are_drawn_from_their_ranges() -> None:
    prompts = [workload(input_tokens="10-30", output_tokens="5-9").prompt(index) for index in range(300)]
    assert {len(one.text.split()) for one in prompts} == set(range(10, 31))
    assert {one.output_tokens for one in prompts} == set(range(5, 10))


def test_a_trace_gives_arrivals_and_lengths_of_the_requests_that_fit() -> None:
    trace = [Arrival(0.0, 20, 3), Arrival(1.0, 4000, 10), Arrival(3.0, 40, 7)]
    settings = settings_of(trace=Path(__file__))
    load = Load("trace", 2 / 3)
    made = Workload(settings, load, 0, scale=TokenScale(), trace=trace, context_tokens=2048)
    assert made.arrivals_s == [0.0, 3.0]
    assert made.left_out == 1
    assert [(len(made.prompt(i).text.split()), made.prompt(i).output_tokens) for i in (0, 1)] == [(20, 3), (40, 7)]


def test_bodies_follow_the_api_of_the_endpoint() -> None:
    prompt = Prompt("hello", output_tokens=9)
    chat = json.loads(RequestFormat("chat", "m", 0.0, ignore_eos=True).body(prompt))
    assert chat == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    completion = json.loads(RequestFormat("completions", "m").body(prompt))
    assert (completion["prompt"], completion["max_tokens"]) == ("hello", 9)
    assert "temperature" not in completion
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert json.loads(RequestFormat("chat", "m").body(Prompt(messages=turns)))["messages"] == turns


def sharegpt(*texts: tuple[str, str]) -> str:
    entries = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for question, answer in texts
    ]
    return json.dumps([*entries, {"conversations": []}])


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.json"
    path.write_text(text)
    return path


def read(path: Path, output_tokens: int | None = None, *, chat: bool = True) -> list[Prompt]:
    return read_dataset(path, token_counter(None), output_tokens, chat=chat)


def test_sharegpt_gives_the_first_question_with_the_length_of_its_answer(tmp_path: Path) -> None:
    path = write(tmp_path, sharegpt(("q" * 40, "a" * 100), ("short", "a" * 100), ("q" * 5000, "a" * 100)))
    assert read(path) == [Prompt("q" * 40, output_tokens=25)]
    assert read(path, 64) == [Prompt("q" * 40, output_tokens=64)]


def test_a_tokenizer_makes_the_lengths_exact(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, sharegpt(("a a a a a", "b b b b b b b")))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        assert read_dataset(path, token_counter(given), None, chat=True) == [Prompt("a a a a a", output_tokens=7)]
    with pytest.raises(UsageError, match="--tokenizer"):
        token_counter(path)


def test_json_lines_give_prompts_and_conversations(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "b"}]
    lines = [{"prompt": "a", "output_tokens": 5}, {"messages": turns}]
    path = write(tmp_path, "\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read(path) == [Prompt("a", output_tokens=5), Prompt(messages=turns)]
    assert [one.output_tokens for one in read(path, 12)] == [12, 12]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompt"),
        ("[1]", "not ShareGPT's format"),
        ("[", "not JSON"),
        ('{"prompt": "a"}\n{"prompt": 3}', ":2: needs 'prompt' (text) or 'messages'"),
        ('{"prompt": "a", "output_tokens": 0}', ":1: 'output_tokens' must be"),
        ("oh\n", ":1: not JSON"),
        ("3\n", ":1: expected an object"),
    ],
)
def test_an_invalid_file_is_rejected_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(write(tmp_path, text))
    assert says in str(caught.value)


def test_conversations_need_the_chat_endpoint(tmp_path: Path) -> None:
    path = write(tmp_path, '{"messages": [{"role": "user", "content": "b"}]}')
    with pytest.raises(UsageError, match="need --endpoint chat"):
        read(path, chat=False)


def test_runs_take_consecutive_prompts_of_a_dataset_and_repeats_are_detected() -> None:
    prompts = [Prompt(str(number)) for number in range(10)]
    made = [
        Workload(
            settings_of(concurrency="1", num_requests=6),
            Load("concurrency", 1),
            cell,
            scale=TokenScale(),
            prompts=prompts,
        )
        for cell in (0, 1)
    ]
    texts = [made[0].prompt(index).text for index in range(6)]
    assert len(set(texts)) == 6
    assert texts != [str(number) for number in range(6)]
    assert not set(texts) & {made[1].prompt(index).text for index in range(4)}
    assert [one.repeats for one in made] == [False, True]
