from __future__ import annotations

import sys
import time
from typing import Any

import orjson
import pytest

from policies.features.request import Endpoint, RequestFeatures, describe


def described(body: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT, workload: str = "") -> RequestFeatures:
    return describe(endpoint, body, model="m", default_temperature=0.6, qps=3.0, in_flight=7, workload=workload)


def chat_body(text: object, /, **fields: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def test_a_plain_chat_request() -> None:
    body = chat_body("Why is the sky blue?", temperature=0.2, stream=True, max_completion_tokens=50, max_tokens=9, n=2)
    features = described(body)
    assert (features.model, features.endpoint, features.stream, features.n) == ("m", Endpoint.CHAT, True, 2)
    assert (features.temperature, features.max_tokens, features.turns) == (0.2, 50, 1)
    assert (features.qps, features.in_flight) == (3.0, 7)
    assert not features.structured
    assert not features.tools


def test_absent_and_null_fields_have_defaults() -> None:
    for body in (chat_body("x"), chat_body("x", temperature=None, max_tokens=None, n=None, top_p=None, stream=None)):
        features = described(body)
        assert (features.temperature, features.top_p, features.max_tokens, features.n) == (0.6, 1.0, None, 1)
        assert not features.stream


@pytest.mark.parametrize(
    ("body", "rejected"),
    [
        ({"min_p": 0.1}, ("min_p",)),
        ({"min_p": "0.1"}, ("min_p",)),
        ({"logit_bias": {"42": -100}}, ("logit_bias",)),
        ({"min_p": 1, "logit_bias": {"42": 0}}, ("min_p", "logit_bias")),
        ({"logprob_token_ids": [5]}, ("logprob_token_ids",)),
        ({"min_p": 0}, ()),
        ({"min_p": 0.0, "logit_bias": {}}, ()),
        ({"min_p": None, "logit_bias": None}, ()),
        ({"min_p": 1e-6}, ()),
    ],
)
def test_baseline_only_lists_what_a_speculating_server_rejects(body: dict[str, Any], rejected: tuple[str, ...]) -> None:
    assert described(chat_body("x", **body)).baseline_only == rejected


@pytest.mark.parametrize(
    ("fields", "restricted"),
    [
        ({"allowed_token_ids": [1, 2]}, True),
        ({"bad_words": ["the"]}, True),
        ({"logit_bias": {"42": 5}}, True),
        ({"vllm_xargs": {"session": "a"}}, False),
        ({"repetition_penalty": 1.3}, True),
        ({"presence_penalty": -2}, True),
        ({"frequency_penalty": "0.5"}, True),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, True),
        ({"guided_regex": "a+"}, True),
        ({"response_format": {"type": "structural_tag"}}, True),
        ({}, False),
        ({"allowed_token_ids": [], "bad_words": None, "logit_bias": {}}, False),
        ({"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0}, False),
        ({"repetition_penalty": 1.05, "presence_penalty": 0.5}, False),
        ({"presence_penalty": "much", "response_format": {"type": ["choice"]}}, False),
        ({"structured_outputs": {"json": {"type": "object"}}, "guided_choice": []}, False),
        ({"response_format": {"type": "json_schema"}}, False),
    ],
)
def test_requests_that_keep_the_model_from_tokens_are_restricted(fields: dict[str, Any], restricted: bool) -> None:
    assert described(chat_body("x", **fields)).restricted is restricted


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"guided_json": {"type": "object"}}, True),
        ({"guided_choice": []}, False),
        ({"structured_outputs": {"regex": "a+"}}, True),
        ({"structured_outputs": None}, False),
        ({"text": {"format": {"type": "json_schema"}}}, True),
        ({"text": {"format": {"type": "text"}}}, False),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, True),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "auto"}}, False),
        ({"tools": [{"type": "function"}]}, False),
    ],
)
def test_structured_output(fields: dict[str, Any], structured: bool) -> None:
    assert described(chat_body("x", **fields)).structured is structured


def test_tools_count_only_if_they_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 400}}]
    assert described(chat_body("x", tools=tools)).tools
    assert not described(chat_body("x", tools=tools, tool_choice={"type": "none"})).tools
    assert not described(chat_body("x", tools=[])).tools
    assert described(chat_body("x", tools=tools)).prompt_tokens > described(chat_body("x")).prompt_tokens + 90


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, None),
        ({"chat_template_kwargs": []}, None),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": True, "reasoning": "high", "reasoning_effort": 3}, None),
        ({}, None),
    ],
)
def test_thinking_is_asked_for_in_several_ways(fields: dict[str, Any], thinking: bool | None) -> None:
    assert described(chat_body("x", **fields)).thinking is thinking


def test_a_conversation_has_the_same_features_in_every_api() -> None:
    system, question, answer, more = "You are terse.", "What is a monad?", "A monoid, of sorts.", "In what category?"
    parts = [{"type": "text", "text": more}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 9000}}]
    chat = {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": parts},
        ]
    }
    messages = {"system": [{"type": "text", "text": system}], "messages": chat["messages"][1:], "max_tokens": 5}
    responses = {
        "instructions": system,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": question}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]},
            {"role": "user", "content": [more, {"type": "input_image", "image_url": "data:" + "A" * 9000}]},
        ],
        "max_output_tokens": 5,
    }
    of_chat = described(chat)
    assert (of_chat.turns, of_chat.max_tokens) == (3, None)
    for other in (described(messages, Endpoint.MESSAGES), described(responses, Endpoint.RESPONSES)):
        assert other.max_tokens == 5
        for name in ("template", "turns", "prompt_tokens", "overlap", "unseen", "shape"):
            assert getattr(other, name) == getattr(of_chat, name), name


def test_the_template_depends_on_the_system_prompt_only() -> None:
    def of(system: str, question: str) -> str:
        return described(
            {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}
        ).template

    assert of("You translate.", "Guten Tag") == of("You translate.", "Bonjour") != of("You sum up.", "Bonjour")
    assert of("A" * 256 + " it is Monday", "x") == of("A" * 256 + " it is Tuesday", "x")
    developer = {"messages": [{"role": "developer", "content": "You translate."}, {"role": "user", "content": "x"}]}
    assert described(developer).template == of("You translate.", "x")
    assert len(of("You translate.", "x")) == 8
    first, later = ({"role": "system", "content": content} for content in ("You translate.", "It is Monday."))
    assert described({"messages": [first, later]}).template == of("You translate.", "x")


def test_without_a_system_prompt_the_template_is_the_first_line() -> None:
    first = described(chat_body("Translate into French:\nGood day"))
    assert first.template == described(chat_body("Translate into French:\nGood night")).template
    assert first.template == described({"prompt": "Translate into French:\nHello"}, Endpoint.COMPLETIONS).template
    assert first.template != described(chat_body("Translate into Greek:\nGood day")).template
    assert described(chat_body("")).template == ""
    assert described({}).template == ""


def test_a_template_is_the_same_in_every_process() -> None:
    assert described(chat_body("Translate into French:")).template == "734433b4"


def test_prompts_of_token_ids_are_counted_exactly() -> None:
    ids = list(range(300)) * 2
    single = described({"prompt": ids}, Endpoint.COMPLETIONS)
    assert (single.prompt_tokens, single.n) == (600, 1)
    several = described({"prompt": [ids, ids[:100]], "n": 3}, Endpoint.COMPLETIONS)
    assert (several.prompt_tokens, several.n) == (700, 6)
    assert described({"prompt": ["one", "two"]}, Endpoint.COMPLETIONS).n == 2
    assert described({"prompt": [*ids[:32], 7]}, Endpoint.COMPLETIONS).template == single.template


def test_a_completion_without_a_limit_has_sixteen_tokens() -> None:
    assert described({"prompt": "x"}, Endpoint.COMPLETIONS).max_tokens == 16
    assert described({"prompt": "x", "max_tokens": None}, Endpoint.COMPLETIONS).max_tokens == 16


def test_overlap_and_code_share_distinguish_kinds_of_prompts() -> None:
    prose = "The committee met on Tuesday. It heard three reports, and adjourned at noon without having voted."
    code = "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n    return width * height\n"
    assert described(chat_body(prose)).code_share == 0.0
    assert described(chat_body(prose)).overlap == 0.0
    assert described(chat_body(code)).code_share == 1.0
    assert described(chat_body(f"Please simplify this:\n```\n{code}```")).code_share == pytest.approx(4 / 7)
    assert described(chat_body("\n".join([prose] * 4))).overlap > 0.7
    assert described(chat_body("1. Wash\n2. Rinse\n  - twice\n  - cold\n3. Dry")).code_share == 0.0


def test_tool_calls_and_results_are_part_of_the_prompt() -> None:
    arguments = orjson.dumps({"path": "a.py", "text": "x = 1\n" * 200}).decode()
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": arguments}}
    chat = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    responses = {"input": [{"type": "function_call", "name": "write", "call_id": "c", "arguments": arguments}]}
    use = {"type": "tool_use", "name": "write", "input": orjson.loads(arguments)}
    messages = {"messages": [{"role": "assistant", "content": [use]}]}
    result = {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": arguments}]}]}
    for body in (chat, responses, messages, result):
        assert described(body).prompt_tokens == pytest.approx(len(arguments) / 4, rel=0.05)


@pytest.mark.parametrize(
    ("declared", "workload"),
    [("code", "code"), (" Code-Review.v2 ", "code-review.v2"), ("", ""), ("a b", ""), ("x" * 41, ""), ("\u00e9", "")],
)
def test_a_declared_workload_must_be_a_valid_name(declared: str, workload: str) -> None:
    assert described(chat_body("x"), workload=declared).workload == workload


def test_embeddings_and_unknown_endpoints_are_described() -> None:
    assert described({"input": ["a b c", "d e f"]}, Endpoint.EMBEDDINGS).n == 2
    assert described({"input": [1, 2, 3]}, Endpoint.EMBEDDINGS).prompt_tokens == 3
    assert described({"prompt": "tokenize me"}, Endpoint.OTHER).prompt_tokens > 0


def test_excessive_nesting_can_be_described() -> None:
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    assert described({"messages": [{"role": "user", "content": deep}], "tools": deep, "prompt": deep}).turns == 1


@pytest.mark.parametrize(
    "unit",
    ["x ", "\n", " ", "\t", "<a\n", "a(", ")", "; ", "def a ", "a = ", "{", "  1", "a.", "(\n", "``` ", "@a", "\u6f22"],
)
def test_no_text_makes_description_slow(unit: str) -> None:
    # A quadratic step would take seconds on these texts; the bound leaves room for a busy machine.
    body = chat_body(unit * (200_000 // len(unit)) + "x.")
    started = time.process_time()
    described(body)
    assert time.process_time() - started < 0.05


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, ()),
        ({"n": 1, "temperature": 0.0}, ()),
        ({"n": 2}, ("several",)),
        ({"tools": [{}]}, ("tools",)),
        ({"tools": [{}], "tool_choice": "none"}, ()),
        ({"tools": [{}], "tool_choice": {"type": "function"}}, ("forced_tool",)),
        ({"response_format": {"type": "json_schema"}, "reasoning_effort": "high"}, ("json_schema", "thinking")),
        ({"text": {"format": {"type": "json_object"}}}, ("json_object",)),
        ({"structured_outputs": {"regex": "a"}, "logprobs": True}, ("regex", "logprobs")),
        ({"structured_outputs": {"json": {}}}, ("other_format",)),
        ({"guided_json": {"type": "object"}}, ("json_schema",)),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ("images",)),
        ({"messages": [{"role": "user", "content": "word " * 8000}]}, ("prompt_8k",)),
        ({"messages": [{"role": "user", "content": "word " * 30000}], "n": 3}, ("several", "prompt_32k")),
    ],
)
def test_shape(fields: dict[str, Any], shape: tuple[str, ...]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    described = describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=0.0, in_flight=0)
    assert described.shape == shape
