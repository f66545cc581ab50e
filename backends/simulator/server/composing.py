"""Composition of the answers to a checked request. These functions are pure and run on a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from backends.simulator.server.answer import compose, sampling
from backends.simulator.server.chat import ChatChoices
from backends.simulator.server.completions import CompletionChoices
from backends.simulator.server.protocol import (
    ChatBody,
    CompletionBody,
    RequestError,
    check_sampling,
    token_limit,
)
from backends.simulator.text import task
from backends.simulator.text.model import TargetModel
from backends.simulator.text.structured import ToolCall, json_text, tool_call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """The model of a replica and its limits."""

    model: TargetModel
    names: tuple[str, ...]  # model names that clients may use; the first is the default
    max_model_len: int
    num_speculative_tokens: int
    default_temperature: float  # sampling temperature of requests without one

    def name_for(self, asked: str | None) -> str:
        """Return the model name of an answer."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            aliases = ", ".join(self.names)
            message = f"The model `{asked}` does not exist. Valid aliases: {aliases}."
            raise RequestError(message, "model", kind="NotFoundError", code=404)
        return asked


def compose_chat(served: Served, body: ChatBody) -> ChatChoices:
    """Compose the choices of a chat completion."""
    if not body.messages:
        raise RequestError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)", "top_logprobs"
        )
    _check_logprobs(body.top_logprobs, "top_logprobs")
    check_sampling(body, speculating=served.num_speculative_tokens > 0)
    choice = body.tool_choice or ("auto" if body.tools else "none")
    tools = [] if choice == "none" else body.tools or []
    if choice != "none" and not tools:
        raise RequestError("When using `tool_choice`, `tools` must be set.", "tool_choice")
    tokenizer = served.model.tokenizer
    prompt = tokenizer.chat_prompt(body.messages, tools, add_generation_prompt=body.add_generation_prompt)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = token_limit(asked, len(prompt), served.max_model_len)
    answered_tool = body.messages[-1].get("role") == "tool"
    request_text = task.last_request(tokenizer.decode(prompt, special=True))
    answers, calls = [], []
    for index in range(body.n or 1):
        random = served.model.random(prompt, sampling(body, index))
        call: ToolCall | None = None
        forced = None
        if tools and not (choice == "auto" and answered_tool):
            call = _structured(partial(tool_call, tools, choice, request_text, random))
            forced = None if call is None else call.text
        if forced is None:
            forced = _structured(
                partial(json_text, body.response_format, body.structured_outputs, request_text, random)
            )
        answers.append(compose(served.model, prompt, body, limit, index, forced))
        calls.append(call)
    return ChatChoices(body, answers, calls, served.model)


def compose_completion(served: Served, body: CompletionBody) -> CompletionChoices:
    """Compose the choices of a completion."""
    _check_logprobs(body.logprobs, "logprobs")
    check_sampling(body, speculating=served.num_speculative_tokens > 0)
    answers = []
    for prompt in _prompts(served, body):
        limit = max(1, token_limit(body.max_tokens, len(prompt), served.max_model_len, at_least=0 if body.echo else 1))
        text = served.model.tokenizer.decode(prompt)
        for index in range(body.n or 1):
            random = served.model.random(prompt, sampling(body, index))
            forced = _structured(partial(json_text, body.response_format, body.structured_outputs, text, random))
            answers.append(compose(served.model, prompt, body, limit, index, forced))
    return CompletionChoices(body, answers, served.model)


def _prompts(served: Served, body: CompletionBody) -> list[list[int]]:
    prompt: Any = body.prompt
    if prompt is None or prompt == []:
        raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    encoded = [served.model.tokenizer.encode(each) if isinstance(each, str) else list(each) for each in prompt]
    for ids in encoded:
        if not ids:
            raise RequestError("The decoder prompt cannot be empty", "prompt")
        worst = max(ids)
        if worst >= len(served.model.tokenizer) or min(ids) < 0:
            raise RequestError(f"Token id {worst} is out of vocabulary")
    return encoded


def _check_logprobs(asked: int | None, field: str) -> None:
    if asked is not None and asked > 20:
        raise RequestError(f"Requested sample {field} of {asked}, which is greater than max allowed: 20", field)


def _structured(make: Callable[[], T]) -> T:
    """Return the result of `make`, which is given the client's arbitrary schema."""
    try:
        return make()
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise RequestError(f"Invalid JSON schema for a structured output: {error}") from error
