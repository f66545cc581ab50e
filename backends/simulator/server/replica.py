"""One simulated replica: vLLM's HTTP API to an engine in real time, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError
from typing import Any, Final, Generic, TypeVar
from uuid import uuid4

from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from backends import background
from backends.calibration.load import load_calibration
from backends.drafting.script import Script
from backends.simulator.engine.replica import SimulatedReplica
from backends.simulator.engine.state import UNCUT
from backends.simulator.server.completions import ChatStream, CompletionStream, chat_body, completion_body
from backends.simulator.server.compose import ComposedAnswer, ServedModel, compose_chat, compose_completion
from backends.simulator.server.driver import Driver, Generation, Play
from backends.simulator.server.messages import CountBody, MessagesStream, messages_body, read_messages
from backends.simulator.server.metrics import EngineCollector, Tallies, page
from backends.simulator.server.protocol import (
    WRONG_BODY,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    InvalidRequestError,
    TextBody,
    TokenizeBody,
    wrong_body,
)
from backends.simulator.server.rendering import RenderedReply, Renderer
from backends.simulator.server.responses import ResponsesStream, read_responses, responses_body
from backends.simulator.server.settings import ReplicaSettings
from backends.simulator.text.model import TargetModel
from backends.speculation import MIN_P_EPSILON

VERSION: Final = "0.32.0+simulated"

B = TypeVar("B", bound=Body)
T = TypeVar("T", bound=TextBody)


@dataclass(frozen=True, slots=True)
class Api(Generic[T]):
    """One of vLLM's APIs for text."""

    prefix: str  # prefix of answer ids, with the hyphen or underscore
    read: Callable[[Any], T]
    compose: Callable[[ServedModel, T], list[ComposedAnswer]]
    whole: Callable[[RenderedReply[T], Sequence[Play]], dict[str, Any]]  # writes a complete answer
    stream: Callable[[RenderedReply[T]], Renderer]  # writes it step by step
    takes_id: bool = True  # whether an answer's id contains the `X-Request-Id` of its request


CHAT = Api("chatcmpl-", ChatBody.model_validate, compose_chat, chat_body, ChatStream)
COMPLETIONS = Api("cmpl-", CompletionBody.model_validate, compose_completion, completion_body, CompletionStream)
RESPONSES = Api("resp_", read_responses, compose_chat, responses_body, ResponsesStream, takes_id=False)
MESSAGES = Api("chatcmpl-", read_messages, compose_chat, messages_body, MessagesStream)


class ReplicaServer:
    """A simulated replica. Must be created in a running event loop."""

    def __init__(self, settings: ReplicaSettings, model: TargetModel, executor: Executor) -> None:
        self._settings = settings
        parameters, calibration = settings.engine_parameters(), load_calibration(settings.calibration)
        engine = SimulatedReplica(
            settings.name, calibration, settings.method, settings.speculative_config, parameters=parameters
        )
        self._registry = CollectorRegistry()
        name = settings.names[0]
        self._driver = Driver(engine, Tallies(name, self._registry), settings.time_scale)
        self._registry.register(
            EngineCollector(
                self._driver.load,
                self._driver.counters,
                name,
                speculating=parameters.k > 0,
                kv_blocks=parameters.kv_blocks,
            )
        )
        temperature = calibration.temperature.default
        self._context_tokens = parameters.max_model_len
        self._served = ServedModel(model, settings.names, parameters.longest_tokens, parameters.k, temperature)
        self._proposer = settings.proposer()
        # One thread (proposers are stateful) that composes answers, so that running streams stay on time.
        self._executor = executor
        self._started_s = int(time.time())
        self._app = Starlette(
            routes=[
                Route("/health", _healthy),
                Route("/version", _version),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, CHAT), methods=["POST"]),
                Route("/v1/completions", partial(self._answer, COMPLETIONS), methods=["POST"]),
                Route("/v1/responses", partial(self._answer, RESPONSES), methods=["POST"]),
                Route("/v1/messages", partial(self._answer, MESSAGES), methods=["POST"]),
            ],
            middleware=[Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])],
            exception_handlers={
                InvalidRequestError: _refused,
                ValidationError: _refused,
                JSONDecodeError: _refused,
                UnicodeDecodeError: _undecodable,
                HTTPException: _no_such_path,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; paths below `/v1` need the API key, as in vLLM."""
        key, headers = self._settings.api_key, Headers(scope=scope)
        request_id = headers.get("x-request-id", uuid4().hex).encode("latin-1")

        async def send_named(message: Message) -> None:
            """Send with the request's id, like vLLM with `--enable-request-id-headers`."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        if (
            key is None
            or scope["method"] == "OPTIONS"
            or not scope["path"].startswith("/v1")
            or _is_key(headers.get("authorization", ""), key)
        ):
            await self._app(scope, receive, send_named)
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send_named)

    async def _answer(self, api: Api[T], request: Request) -> Response:
        """Answer a request for text."""
        body = api.read(await _json_of(request))
        self._served.check_name(body.model)
        temperature = self._served.temperature(body)
        body.check(temperature)
        bound = temperature > 0.0 and (body.min_p or 0.0) > MIN_P_EPSILON
        if self._served.num_speculative_tokens and (body.logit_bias or bound):
            raise InvalidRequestError(
                "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
            )
        loop = asyncio.get_running_loop()
        answers, scripts = await loop.run_in_executor(self._executor, self._compose, api, body, temperature)
        given = request.headers.get("x-request-id") if api.takes_id else None
        reply = RenderedReply(
            body,
            answers,
            api.prefix + (given or uuid4().hex[:16]),
            int(time.time()),
            self._served.names[0],
            f"vllm-{VERSION}-{self._settings.method}",
            self._served.num_speculative_tokens,
        )
        depth = body.depth if self._settings.draft_depth else UNCUT
        play = partial(Generation, self._driver, answers, scripts, temperature, body.priority, depth)
        return _Played(api, reply, play)

    def _compose(self, api: Api[T], body: T, temperature: float) -> tuple[list[ComposedAnswer], list[Script]]:
        answers = api.compose(self._served, body)
        return answers, [self._proposer.script(each.prompt_ids, each.ids, temperature, each.kind) for each in answers]

    async def _metrics(self, _: Request) -> Response:
        return Response(page(self._registry), media_type="text/plain; version=0.0.4")

    async def _models(self, _: Request) -> Response:
        fields = {"object": "model", "created": self._started_s, "owned_by": "vllm", "root": self._settings.model}
        fields["max_model_len"] = self._context_tokens
        return JSONResponse({"object": "list", "data": [{"id": name, **fields} for name in self._served.names]})

    async def _tokenize(self, request: Request) -> Response:
        body, tokenizer = await self._read(request, TokenizeBody), self._served.model.tokenizer
        ids = tokenizer.encode(body.prompt) if body.messages is None else tokenizer.chat_prompt(body.messages)
        return JSONResponse({"count": len(ids), "max_model_len": self._context_tokens, "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeBody)
        return JSONResponse(
            {"prompt": self._served.model.tokenizer.decode(self._served.known(body.tokens), special=True)}
        )

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._read(request, CountBody)
        prompt = self._served.model.tokenizer.chat_prompt(body.conversation(), body.functions())
        return JSONResponse({"input_tokens": len(prompt)})

    async def _read(self, request: Request, shape: type[B]) -> B:
        body = shape.model_validate(await _json_of(request))
        self._served.check_name(body.model)
        return body


class _Played(Response):
    """An answer that the engine plays until it is complete or its client leaves."""

    def __init__(self, api: Api[T], reply: RenderedReply[T], start: Callable[[], Generation]) -> None:
        self._api = api
        self._reply = reply
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        generation = self._start()
        sending = background.start("requests", self._send(generation, scope, receive, send))
        leaving = background.start("requests", _gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()
            generation.cancel()

    async def _send(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._reply.body.stream:
            async for _ in generation.steps():
                pass
            await JSONResponse(self._api.whole(self._reply, generation.plays))(scope, receive, send)
            return
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        renderer = self._api.stream(self._reply)
        async for emitted in generation.steps():
            events = renderer.step(emitted)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": renderer.end(generation.plays)})


async def _gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_key(given: str, key: str) -> bool:
    scheme, _, token = given.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())


async def _healthy(_: Request) -> Response:
    return Response()


async def _version(_: Request) -> Response:
    return JSONResponse({"version": VERSION})


async def _json_of(request: Request) -> Any:
    """Return a request's body."""
    if request.headers.get("content-type", "").lower().partition(";")[0] != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise InvalidRequestError(message, kind=WRONG_BODY)
    return await request.json()


async def _refused(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be served."""
    if isinstance(error, JSONDecodeError):
        wrong = {"type": "json_invalid", "loc": (error.pos,), "msg": "JSON decode error", "input": {}}
        error = wrong_body([wrong | {"ctx": {"error": error.msg}}])
    elif isinstance(error, ValidationError):
        error = wrong_body(error.errors(include_url=False))
    assert isinstance(error, InvalidRequestError)
    is_messages = request.url.path.startswith("/v1/messages") and error.kind != WRONG_BODY
    return JSONResponse(error.anthropic_body() if is_messages else error.body(), error.code)


async def _undecodable(*_: object) -> Response:
    return JSONResponse({"detail": "There was an error parsing the body"}, 400)


async def _no_such_path(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
