"""One simulated replica: vLLM's HTTP API in front of an engine in real time."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

import orjson

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.replica import Replica as EngineReplica
from backends.simulator.server.chat import ChatStream, chat_body
from backends.simulator.server.completions import CompletionStream, completion_body
from backends.simulator.server.composing import Served, compose_chat, compose_completion
from backends.simulator.server.dispatch import CrossOrigin, Route, Routes
from backends.simulator.server.driver import Driver
from backends.simulator.server.http import Exchange, Listener, Request
from backends.simulator.server.messages import (
    CountRequest,
    MessagesStream,
    conversation,
    functions,
    messages_body,
    messages_error,
    read_messages,
)
from backends.simulator.server.metrics import ReplicaMetrics, Tallies, page
from backends.simulator.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RequestError,
    TokenizeBody,
    read_json,
    validate,
)
from backends.simulator.server.responses import (
    ResponsesStream,
    compose_responses,
    not_stored,
    read_responses,
    responses_body,
)
from backends.simulator.server.service import Api, TextService, reader
from backends.simulator.server.settings import ReplicaSettings
from backends.simulator.text.model import TargetModel

VERSION = "0.32.0+simulated"

B = TypeVar("B", bound=Body)

CHAT = Api("chatcmpl-", reader(ChatBody), compose_chat, chat_body, ChatStream)
COMPLETIONS = Api("cmpl-", reader(CompletionBody), compose_completion, completion_body, CompletionStream)
RESPONSES = Api("resp_", read_responses, compose_responses, responses_body, ResponsesStream)
MESSAGES = Api("chatcmpl-", read_messages, compose_chat, messages_body, MessagesStream, messages_error)


_NEEDS_KEY: Final = ("/v1", "/v2", "/inference", "/cohere")
"""Beginnings of the paths that need the API key, as in vLLM."""


class Replica:
    """A simulated replica with its HTTP server. Must be created in a running event loop."""

    def __init__(self, settings: ReplicaSettings, model: TargetModel, executor: Executor) -> None:
        self.settings = settings
        self.port = settings.port
        parameters = settings.engine_parameters()
        calibration = load_calibration(settings.calibration)
        engine = EngineReplica(
            settings.name, calibration, settings.method, settings.speculative_config, parameters=parameters
        )
        self._tallies = Tallies(settings.max_model_len)
        self._driver = Driver(engine, self._tallies, settings.time_scale)
        self._metrics = ReplicaMetrics(
            self._tallies,
            self._driver.load,
            self._driver.counters,
            settings.names[0],
            speculating=parameters.k > 0,
            kv_blocks=parameters.kv_blocks,
        )
        self._served = Served(
            model, settings.names, settings.max_model_len, parameters.k, settings.default_temperature()
        )
        self._started_s = int(time.time())
        self._loop = asyncio.get_running_loop()
        self._service = TextService(
            self._served,
            self._driver,
            settings.proposer(),
            executor,
            f"vllm-{VERSION}-{settings.method}",
            settings.max_num_queued_reqs,
        )
        self._listener = Listener(self._handle)
        self._cross_origin = CrossOrigin(settings.allowed_origins)
        handle, get, post = self._service.handle, ("GET",), ("POST",)
        self._routes = Routes(
            (
                Route("/health", get, _healthy),
                Route("/ping", ("GET", "POST"), _healthy),
                Route("/version", get, partial(_json, {"version": VERSION})),
                Route("/load", get, lambda exchange: _json({"server_load": self._service.in_flight}, exchange)),
                Route("/metrics", get, self._page),
                Route("/v1/models", get, self._models),
                Route("/tokenize", post, self._tokenize),
                Route("/detokenize", post, self._detokenize),
                Route("/v1/chat/completions", post, partial(handle, CHAT)),
                Route("/v1/completions", post, partial(handle, COMPLETIONS)),
                Route("/v1/responses", post, partial(handle, RESPONSES)),
                Route("/v1/responses/{response_id}", get, _response_not_found),
                Route("/v1/responses/{response_id}/cancel", post, _response_not_found),
                Route("/v1/messages", post, partial(handle, MESSAGES)),
                Route("/v1/messages/count_tokens", post, self._count_tokens),
                Route("/invocations", post, self._invocations),
            )
        )

    async def start(self) -> None:
        """Listen; sets `port`."""
        self.port = await self._listener.start(self.settings.host, self.settings.port)

    async def stop(self) -> None:
        """Stop at once; open connections are aborted."""
        self._driver.close()
        await self._listener.stop()

    def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        request_id = request.headers.get("x-request-id") or uuid4().hex
        exchange.answer_headers += [("x-request-id", request_id), ("x-simulated", "true")]
        if not self._authorized(request):
            _json({"error": "Unauthorized"}, exchange, 401)
            return
        if self._cross_origin.is_preflight(exchange):
            self._cross_origin.answer_preflight(exchange)
            return
        exchange.answer_headers += self._cross_origin.headers(request.headers.get("origin"))
        route = self._routes.find(exchange)
        if route is not None:
            exchange.on_finished = partial(self._count, route)
            try:
                route.handler(exchange)
            except RequestError as error:
                _json(error.body(), exchange, error.code)

    def _authorized(self, request: Request) -> bool:
        """Return whether a request needs no API key or has the right one."""
        key = self.settings.api_key
        if key is None or request.method == "OPTIONS" or not request.path.startswith(_NEEDS_KEY):
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())

    def _count(self, route: Route, exchange: Exchange) -> None:
        request = exchange.request
        duration_s = self._loop.time() - request.received_s
        self._tallies.count_http(route.path, request.method, exchange.status, duration_s)

    def _page(self, exchange: Exchange) -> None:
        writing = self._loop.run_in_executor(None, page, self._metrics.families())
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        writing.add_done_callback(lambda written: exchange.respond(200, written.result(), content_type))

    def _models(self, exchange: Exchange) -> None:
        entries = [
            {
                "id": name,
                "object": "model",
                "created": self._started_s,
                "owned_by": "vllm",
                "root": self.settings.model,
                "parent": None,
                "max_model_len": self.settings.max_model_len,
                "permission": [_permission(self._started_s)],
            }
            for name in self._served.names
        ]
        _json({"object": "list", "data": entries}, exchange)

    def _tokenize(self, exchange: Exchange) -> None:
        body = self._read(exchange, TokenizeBody)
        tokenizer = self._served.model.tokenizer
        if body.messages is not None:
            ids = tokenizer.chat_prompt(
                body.messages, body.tools or (), add_generation_prompt=body.add_generation_prompt
            )
        elif body.prompt is not None:
            ids = tokenizer.encode(body.prompt)
        else:
            raise RequestError("Either prompt or messages must be given.", "prompt")
        strings = [tokenizer.string(token) for token in ids] if body.return_token_strs else None
        limit = self.settings.max_model_len
        _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}, exchange)

    def _detokenize(self, exchange: Exchange) -> None:
        body = self._read(exchange, DetokenizeBody)
        tokenizer = self._served.model.tokenizer
        for token in body.tokens:
            if not 0 <= token < len(tokenizer):
                raise RequestError(f"Token id {token} is out of vocabulary")
        _json({"prompt": tokenizer.decode(body.tokens, special=True)}, exchange)

    def _count_tokens(self, exchange: Exchange) -> None:
        body = self._read(exchange, CountRequest)
        count = len(self._served.model.tokenizer.chat_prompt(conversation(body), functions(body) or ()))
        _json({"input_tokens": count, "context_management": {"original_input_tokens": count}}, exchange)

    def _invocations(self, exchange: Exchange) -> None:
        """Answer a request of SageMaker, which is a chat completion if it can be one, else a completion."""
        value = read_json(exchange.request.headers.get("content-type", ""), exchange.request.body)
        asked = value if isinstance(value, dict) else {}
        with contextlib.suppress(RequestError):
            CHAT.read(value)
            self._service.handle(CHAT, exchange)
            return
        with contextlib.suppress(RequestError):
            COMPLETIONS.read(value)
            if asked.get("prompt") is not None:
                self._service.handle(COMPLETIONS, exchange)
                return
        raise RequestError(
            "Cannot find suitable handler for request. Expected one of: ['ChatCompletionRequest', 'CompletionRequest']"
        )

    def _read(self, exchange: Exchange, shape: type[B]) -> B:
        request = exchange.request
        body = validate(shape, read_json(request.headers.get("content-type", ""), request.body))
        self._served.name_for(body.model)
        return body


def _response_not_found(exchange: Exchange) -> None:
    raise not_stored(exchange.request.path.split("/")[3])


def _healthy(exchange: Exchange) -> None:
    exchange.respond(200, b"", None)


def _json(value: Any, exchange: Exchange, status: int = 200) -> None:
    exchange.respond(status, orjson.dumps(value))


def _permission(created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
