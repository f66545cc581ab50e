"""LlamaIndex's `OpenAILike`."""

from __future__ import annotations

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.report import HELLO, KEY, MODEL, URL, WEATHER, City, check, run

SAY = [ChatMessage(role="user", content=HELLO)]


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def llm(model: str = MODEL, key: str = KEY) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=f"{URL}/v1",
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=60,
        context_window=8192,
    )


def ask(**options: str) -> object:
    return llm(**options).chat(SAY).message.content


def stream() -> None:
    check("".join(piece.delta or "" for piece in llm().stream_chat(SAY)))


def completions() -> None:
    plain = llm().model_copy(update={"is_chat_model": False})
    check(plain.complete("def f(").text)
    check("".join(piece.delta or "" for piece in plain.stream_complete("def f(")))


def tools() -> None:
    answer = llm().chat_with_tools([FunctionTool.from_defaults(get_weather)], WEATHER, tool_required=True)
    (call,) = llm().get_tool_calls_from_response(answer)
    check("city" in call.tool_kwargs, call)


def structured() -> None:
    answer = llm().as_structured_llm(City).chat([ChatMessage(role="user", content=WEATHER)])
    check(isinstance(answer.raw, City), answer)


run(
    "llama-index-llms-openai-like",
    ask,
    (openai.NotFoundError, ""),
    (openai.AuthenticationError, ""),
    [stream, completions, tools, structured],
)
