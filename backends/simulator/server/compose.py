"""Composes the answers to a request before the engine plays them. Runs on a thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.calibration.calibration import Kind
from backends.simulator.server.protocol import ChatBody, CompletionBody, InvalidRequestError, TextBody
from backends.simulator.text import task
from backends.simulator.text.model import Sampling, TargetModel
from backends.simulator.text.structured import ToolCall, json_text, tool_call
from backends.simulator.text.tokenizer import END_OF_TURN


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A replica's model and its limits."""

    model: TargetModel
    names: tuple[str, ...]  # model names that clients may use; the first is in answers
    max_model_len: int
    num_speculative_tokens: int
    default_temperature: float  # sampling temperature of requests that set none

    def check_name(self, asked: str | None) -> None:
        """Reject a model name that the replica does not serve."""
        if asked and asked not in self.names:
            message = f"The model `{asked}` does not exist. Valid aliases: {', '.join(self.names)}."
            raise InvalidRequestError(message, "model", kind="NotFoundError", code=404)

    def known(self, ids: list[int]) -> list[int]:
        """Return token ids if all of them are in the vocabulary; raise otherwise."""
        for token in ids:
            if not 0 <= token < len(self.model.tokenizer):
                raise InvalidRequestError(f"Token id {token} is out of vocabulary")
        return ids

    def temperature(self, body: TextBody) -> float:
        """Return the sampling temperature of a request."""
        return self.default_temperature if body.temperature is None else body.temperature


@dataclass(frozen=True, slots=True)
class ComposedAnswer:
    """One choice of an answer."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    lengths: list[int]  # characters of `text` that can be shown after each token
    kind: Kind
    finish_reason: str  # `stop`, `length` or `tool_calls`
    stop_string: str | None = None  # the stop string that ended it
    tool: ToolCall | None = None  # the tool call in its text

    def shown(self, start: int, end: int) -> str:
        """Return the text of the tokens from `start` to `end`; for a tool call, only its arguments."""
        since, until = (self.lengths[start - 1] if start else 0), self.lengths[end - 1]
        if self.tool is not None:
            since, until = max(since, self.tool.start), min(until, self.tool.end)
        return self.text[since:until]

    @property
    def arguments(self) -> str:
        """The arguments of the tool call."""
        assert self.tool is not None
        return self.text[self.tool.start : self.tool.end]


def compose_chat(served: ServedModel, body: ChatBody) -> list[ComposedAnswer]:
    """Compose the choices of a chat completion."""
    tokenizer = served.model.tokenizer
    choice = body.calls
    tools = [] if body.tool_choice == "none" else body.tools or []
    try:
        prompt = tokenizer.chat_prompt(body.messages, tools)
    except (AttributeError, TypeError) as error:
        raise InvalidRequestError(f"Invalid messages: {error}", "messages") from error
    limit = body.limit(len(prompt), served.max_model_len)
    request = task.last_request(tokenizer.decode(prompt, special=True))
    call: ToolCall | None = None
    if choice != "none" and not (choice == "auto" and body.messages[-1].get("role") == "tool"):
        call = _checked(tools, choice, request)
    composed = [_compose(served, body, prompt, limit, request, index, call) for index in range(body.n)]
    if call is None or isinstance(choice, Mapping):  # calling the one tool that the client named is a plain stop
        return composed
    return [replace(each, finish_reason="tool_calls") if each.tool is not None else each for each in composed]


def compose_completion(served: ServedModel, body: CompletionBody) -> list[ComposedAnswer]:
    """Compose the choices of a completion: `n` for each prompt, prompt by prompt."""
    tokenizer, prompt = served.model.tokenizer, body.prompt
    prompts: Sequence[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    answers = []
    for ids in [tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]:
        if not ids:
            raise InvalidRequestError("The decoder prompt cannot be empty", "prompt")
        text = tokenizer.decode(served.known(ids))
        limit = body.limit(len(ids), served.max_model_len)
        answers += [_compose(served, body, ids, limit, text, index) for index in range(body.n)]
    return answers


def _checked(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], request: str) -> ToolCall | None:
    try:
        return tool_call(tools, choice, request)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"Invalid JSON schema of a tool: {error}", "tools") from error


def _compose(
    served: ServedModel,
    body: TextBody,
    prompt_ids: list[int],
    limit: int,
    request: str,
    index: int,
    call: ToolCall | None = None,
) -> ComposedAnswer:
    """Compose choice `index`."""
    model = served.model
    try:
        forced = call.text if call is not None else json_text(body.response_format, request)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"Invalid JSON schema for a structured output: {error}", "response_format") from error
    if forced is None:
        seed = None if body.seed == -1 else body.seed  # vLLM takes -1 for none
        sampling = Sampling(served.temperature(body), body.top_p or 1.0, seed, index)
        writing = model.write(prompt_ids, sampling, limit, limit if body.ignore_eos else body.min_tokens)
        ids, kind, stopped = writing.ids, writing.kind, writing.stopped
    else:
        ids, kind = [*model.tokenizer.encode(forced), END_OF_TURN], Kind.EXTRACTION
        ids, stopped = ids[:limit], len(ids) <= limit
    text, lengths = model.tokenizer.pieces(ids)
    stop = None
    if body.stops:
        early = lengths[min(body.min_tokens, len(ids)) - 1] if body.min_tokens else 0
        begins, stop = _first_stop(text, early, body.stops)
        if stop is not None:
            ids, stopped = ids[: bisect_left(lengths, begins + len(stop)) + 1], True
            text = text[:begins]
        # A stream holds back what may yet turn out to be a stop string.
        held = max(map(len, body.stops)) - 1
        lengths = [max(0, length - held) for length in lengths[: len(ids) - 1]] + [len(text)]
    done = "stop" if stopped else "length"
    return ComposedAnswer(prompt_ids, ids, text, lengths, kind, done, stop, call if stopped and stop is None else None)


def _first_stop(text: str, early: int, stops: Sequence[str]) -> tuple[int, str | None]:
    """Return where the stop string begins that ends first after the first `early` characters, and the string."""
    places = ((text.find(stop, max(0, early - len(stop) + 1)), stop) for stop in stops)
    found = [(place, stop) for place, stop in places if place >= 0]
    return min(found, key=lambda one: one[0] + len(one[1]), default=(-1, None))
