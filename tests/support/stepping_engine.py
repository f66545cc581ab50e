"""A scripted engine with vLLM's answers in all four APIs, whose steps each emit the same number of tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.upstream import Wire

PROMPT_TOKENS = 7
FINGERPRINT = "vllm-0.32.0-0"


@dataclass
class SteppingEngine:
    """Answers every request with `tokens` tokens; the behaviour of an upstream.

    Parameters
    ----------
    per_step
        Tokens of a step, the last one excepted.
    step_s
        Seconds of a step.
    prompt_tokens
        Tokens of every prompt; None for ten more than it has words.
    joined
        Steps of a chunk, as with `--stream-interval`, or where vLLM's API server does not keep up.
    reports
        Whether it runs with `--per-request-spec-decode-metrics`.
    forces
        Whether it runs with `--enable-force-include-usage`.
    tells
        Where it tells the usage of a stream to who asks: in an event of its own, as vLLM does, in that of the `finish`,
        or in `every` event.
    refuses
        Whether it knows no `stream_options`.

    Attributes
    ----------
    served, asked
        Requests, and those of them that asked for the usage of a stream.
    streamed
        All bytes of the last stream.
    """

    per_step: int = 1
    step_s: float = 0.0
    tokens: int = 60
    prompt_tokens: int | None = PROMPT_TOKENS
    joined: int = 1
    reports: bool = False
    forces: bool = False
    tells: Literal["event", "finish", "every"] = "event"
    refuses: bool = False
    served: int = 0
    asked: int = 0
    all_steps: int = 0
    all_tokens: int = 0
    streamed: bytes = b""

    async def __call__(self, wire: Wire) -> None:
        """Answer a request."""
        body = wire.seen.json
        if self.refuses and "stream_options" in body:
            await wire.json({"error": {"message": "unknown field stream_options", "code": 400}}, 400)
            return
        self.served += 1
        self.asked += bool((body.get("stream_options") or {}).get("include_usage"))
        steps = [min(self.per_step, self.tokens - at) for at in range(0, self.tokens, self.per_step)]
        choices = body.get("n") or 1
        self.all_steps += choices * len(steps)
        self.all_tokens += choices * self.tokens
        api = wire.seen.target
        if not body.get("stream"):
            await asyncio.sleep(self.step_s * len(steps))
            await self._publish(wire)
            await wire.json(self._whole(api, body, len(steps)))
            return
        await wire.begin_stream()
        self.streamed = b""
        for event in self._events(api, body, steps):
            if event is None:
                await asyncio.sleep(self.step_s)
                continue
            self.streamed += event
            await wire.chunk(event)
        await self._publish(wire)
        await wire.end_stream()

    async def _publish(self, wire: Wire) -> None:
        """Show on the page of metrics what has been done."""
        counters = {
            "generation_tokens_total": self.all_tokens,
            "time_to_first_token_seconds_count": self.served,
            "inter_token_latency_seconds_count": self.all_steps - self.served,
        }
        page = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
        wire.upstream.metrics = page + b"".join(b"vllm:%b %d\n" % (each.encode(), counters[each]) for each in counters)

    def _usage(
        self, body: dict[str, Any], *, names: tuple[str, str] = ("prompt_tokens", "completion_tokens")
    ) -> dict[str, int]:
        prompt, tokens = self.prompt_tokens, (body.get("n") or 1) * self.tokens
        if prompt is None:
            prompt = 10 + len(str(body.get("prompt") or body["messages"][-1]["content"]).split())
        return {names[0]: prompt, names[1]: tokens, "total_tokens": prompt + tokens}

    def _metrics(self, choices: int, steps: int) -> dict[str, Any]:
        if not (self.reports and choices == 1):
            return {}
        accepted = self.tokens - steps
        spec = {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted, "num_draft_tokens": 3 * steps}
        return {"metrics": {"speculative_decoding": spec}}

    def _whole(self, api: str, body: dict[str, Any], steps: int) -> dict[str, Any]:
        choices = body.get("n") or 1
        text = "x" * self.tokens
        if api == "/v1/messages":
            content = [{"type": "text", "text": text}]
            usage = self._usage(body, names=("input_tokens", "output_tokens"))
            head = {"id": "x", "type": "message", "role": "assistant", "stop_reason": "max_tokens"}
            return {**head, "content": content, "usage": usage}
        if api == "/v1/responses":
            usage = self._usage(body, names=("input_tokens", "output_tokens"))
            return {"id": "x", "object": "response", "status": "incomplete", "output": [], "usage": usage}
        message = (
            {"message": {"role": "assistant", "content": text}} if api == "/v1/chat/completions" else {"text": text}
        )
        listed = [{"index": index, **message, "finish_reason": "length"} for index in range(choices)]
        return {"id": "x", "choices": listed, "usage": self._usage(body), **self._metrics(choices, steps)}

    def _events(self, api: str, body: dict[str, Any], steps: list[int]) -> Iterator[bytes | None]:
        """Yield the events of a stream, and None for each step."""
        if api == "/v1/messages":
            yield from self._message(body, steps)
        elif api == "/v1/responses":
            yield from self._response(body, steps)
        else:
            yield from self._chunks(api == "/v1/chat/completions", body, steps)

    def _joined_steps(self, steps: list[int]) -> Iterator[tuple[str | None, bool]]:
        """Yield the text of each chunk, or None for a step that is not shown yet."""
        text = ""
        for number, tokens in enumerate(steps, 1):
            text += "ab " * tokens
            is_last = number == len(steps)
            yield (text, is_last) if is_last or number % self.joined == 0 else (None, False)
            text = "" if number % self.joined == 0 else text

    def _message(self, body: dict[str, Any], steps: list[int]) -> Iterator[bytes | None]:
        usage = self._usage(body, names=("input_tokens", "output_tokens"))
        yield _named(
            {"type": "message_start", "message": {"id": "x", "usage": {"input_tokens": 7, "output_tokens": 0}}}
        )
        for text, _ in self._joined_steps(steps):
            yield None
            if text is not None:
                yield _named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
        yield _named({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage})
        yield _named({"type": "message_stop"})

    def _response(self, body: dict[str, Any], steps: list[int]) -> Iterator[bytes | None]:
        usage = self._usage(body, names=("input_tokens", "output_tokens"))
        yield _named({"type": "response.created", "response": {"id": "x"}})
        for text, _ in self._joined_steps(steps):
            yield None
            if text is not None:
                yield _named({"type": "response.output_text.delta", "delta": text})
        yield _named({"type": "response.completed", "response": {"id": "x", "usage": usage}})

    def _chunks(self, chat: bool, body: dict[str, Any], steps: list[int]) -> Iterator[bytes | None]:
        choices, asks = body.get("n") or 1, bool((body.get("stream_options") or {}).get("include_usage"))
        head = {"id": "x", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": "m"}
        running = {"usage": self._usage(body)} if self.forces or (asks and self.tells == "every") else {}
        for index in range(choices if chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield _event(head | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]} | running)
        field = "reasoning" if body.get("chat_template_kwargs") else "content"
        for text, is_last in self._joined_steps(steps):
            yield None
            for index in range(choices if text is not None else 0):
                shown: dict[str, Any] = {"text": text}
                if chat and body.get("tools"):
                    shown = {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}
                elif chat:
                    shown = {"delta": {field: text}}
                choice = {"index": index, **shown, "logprobs": None, "finish_reason": "length" if is_last else None}
                is_alone = not (asks or self.forces) or self.tells != "event"
                last: dict[str, Any] = {"system_fingerprint": FINGERPRINT} if is_last and is_alone else {}
                if is_last and asks and self.tells == "finish":
                    last = {"usage": self._usage(body)} | last
                yield _event(head | {"choices": [choice]} | running | last)
        if (asks or self.forces) and self.tells == "event":
            last = {"choices": [], "usage": self._usage(body), "system_fingerprint": FINGERPRINT}
            yield _event(head | last | self._metrics(choices, len(steps)))
        yield b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _named(document: dict[str, Any]) -> bytes:
    return b"event: " + document["type"].encode() + b"\n" + _event(document)
