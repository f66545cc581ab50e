"""Answers of `POST /v1/completions`, complete and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backends.simulator.server.answer import Answer
from backends.simulator.server.http import Exchange
from backends.simulator.server.playback import Play, Usage, request_metrics
from backends.simulator.server.protocol import CompletionBody
from backends.simulator.server.rendering import DONE, Head, completion_logprobs, event
from backends.simulator.text.model import TargetModel


@dataclass(frozen=True, slots=True)
class CompletionChoices:
    """The answers to a completion request: `n` for each prompt, prompt by prompt."""

    body: CompletionBody
    answers: Sequence[Answer]
    model: TargetModel

    def echoed(self, answer: Answer) -> str:
        """Return the text before the answer: the prompt if it is to be echoed, else nothing."""
        return self.model.tokenizer.decode(answer.prompt_ids) if self.body.echo else ""

    @property
    def only_echoes(self) -> bool:
        """Whether only the prompt was requested."""
        return bool(self.body.echo) and self.body.max_tokens == 0

    def logprobs(self, answer: Answer, start: int, end: int) -> dict[str, Any] | None:
        """Return the log probabilities of tokens, if requested."""
        if self.body.logprobs is None:
            return None
        offset = len(self.echoed(answer)) + (answer.lengths[start - 1] if start else 0)
        return completion_logprobs(self.model, answer, start, end, self.body.logprobs, offset)


def completion_body(head: Head, choices: CompletionChoices, plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete completion."""
    body = choices.body
    with_ids = body.return_token_ids
    return {
        **head.fields("text_completion"),
        "choices": [
            {
                "index": index,
                "text": choices.echoed(answer) + ("" if choices.only_echoes else answer.text),
                "logprobs": choices.logprobs(answer, 0, 0 if choices.only_echoes else len(answer.ids)),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "token_ids": answer.ids if with_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": answer.prompt_ids if with_ids else None,
                "routed_experts": None,
            }
            for index, answer in enumerate(choices.answers)
        ],
        "service_tier": None,
        "system_fingerprint": head.fingerprint,
        "usage": Usage.of(plays, include_created=False).body(),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": request_metrics(plays, head.num_speculative_tokens),
    }


class CompletionStream:
    """A completion as server-sent events: a chunk for each step, and one with the usage."""

    def __init__(self, exchange: Exchange, head: Head, choices: CompletionChoices) -> None:
        self._exchange = exchange
        self._head = head
        self._choices = choices
        options = choices.body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(self._usage and options and options.continuous_usage_stats)

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Send the chunk of a step."""
        choices, answer = self._choices, play.answer
        shown = answer.lengths
        text = answer.text[shown[start - 1] if start else 0 : shown[end - 1]]
        if start == 0:
            text = choices.echoed(answer) + ("" if choices.only_echoes else text)
        with_ids = choices.body.return_token_ids
        chunk = self._head.fields("text_completion")
        chunk["choices"] = [
            {
                "index": play.index,
                "text": text,
                "logprobs": choices.logprobs(answer, start, end),
                "finish_reason": answer.finish_reason if play.finished else None,
                "stop_reason": answer.stop_reason if play.finished else None,
                "prompt_token_ids": answer.prompt_ids if with_ids and start == 0 else None,
                "token_ids": answer.ids[start:end] if with_ids else None,
            }
        ]
        if self._continuous:
            prompt = len(answer.prompt_ids)
            chunk["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + end, "completion_tokens": end}
        if play.finished and not self._usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        self._exchange.write(event(chunk))

    def done(self, plays: Sequence[Play]) -> None:
        """Send the usage, if requested, and end the stream."""
        last = b""
        if self._usage:
            chunk = self._head.fields("text_completion")
            chunk["choices"] = []
            chunk["usage"] = Usage.of(plays, include_created=False).chunk()
            chunk["system_fingerprint"] = self._head.fingerprint
            metrics = request_metrics(plays, self._head.num_speculative_tokens)
            if metrics is not None:
                chunk["metrics"] = {name: value for name, value in metrics.items() if value is not None}
            last = event(chunk)
        self._exchange.end(last + DONE)
