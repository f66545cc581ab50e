"""One simulated replica: vLLM's HTTP API in front of an engine in real time."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import orjson

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.replica import Replica as EngineReplica
from backends.simulator.server.chat import ChatStream, chat_body
from backends.simulator.server.completions import CompletionStream, completion_body
from backends.simulator.server.composing import Served, compose_chat, compose_completion
from backends.simulator.server.driver import Driver
from backends.simulator.server.http import Exchange, Listener
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
from backends.simulator.server.responses import ResponsesStream, read_responses, responses_body
from backends.simulator.server.service import Api, TextService, reader
from backends.simulator.server.settings import ReplicaSettings
from backends.simulator.text.model import TargetModel

VERSION = "0.32.0+simulated"

B = TypeVar("B", bound=Body)

CHAT = Api("chatcmpl-", reader(ChatBody), compose_chat, chat_body, ChatStream)
COMPLETIONS = Api("cmpl-", reader(CompletionBody), compose_completion, completion_body, CompletionStream)
RESPONSES = Api("resp_", read_responses, compose_chat, responses_body, ResponsesStream)
MESSAGES = Api("chatcmpl-", read_messages, compose_chat, messages_body, MessagesStream, messages_error)


class Replica:
    """A simulated replica with its HTTP server. Must be created in a running event loop.

    Parameters
    ----------
    model
        Target model, shared by all replicas of that model.
    executor
        Executor with one thread, see `TextService`.
    """

    def __init__(self, settings: ReplicaSettings, model: TargetModel, executor: Executor) -> None:
        self.settings = settings
        self.port = settings.port
        parameters = settings.engine_parameters()
        calibration = load_calibration(settings.calibration)
        engine = EngineReplica(settings.name, calibration, settings.method, parameters=parameters)
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
        handle = self._service.handle
        self._routes: dict[str, tuple[str, Callable[[Exchange], None]]] = {
            "/health": ("GET", _healthy),
            "/ping": ("GET, POST", _healthy),
            "/version": ("GET", partial(_json, {"version": VERSION})),
            "/load": ("GET", lambda exchange: _json({"server_load": self._service.in_flight}, exchange)),
            "/metrics": ("GET", self._page),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/v1/chat/completions": ("POST", partial(handle, CHAT)),
            "/v1/completions": ("POST", partial(handle, COMPLETIONS)),
            "/v1/responses": ("POST", partial(handle, RESPONSES)),
            "/v1/messages": ("POST", partial(handle, MESSAGES)),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
        }

    async def start(self) -> None:
        """Listen; sets `port`.

        Raises
        ------
        OSError
            If the address is not available.
        """
        self.port = await self._listener.start(self.settings.host, self.settings.port)

    async def stop(self) -> None:
        """Stop at once; open connections are aborted."""
        self._driver.close()
        await self._listener.stop()

    def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        request_id = request.headers.get("x-request-id") or uuid4().hex
        exchange.answer_headers += [("vary", "Origin"), ("x-request-id", request_id), ("x-simulated", "true")]
        methods, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            _json({"detail": "Not Found"}, exchange, 404)
        elif request.method not in methods:
            exchange.answer_headers.append(("allow", methods))
            _json({"detail": "Method Not Allowed"}, exchange, 405)
        elif not self._authorized(request.path, request.headers):
            _json({"error": "Unauthorized"}, exchange, 401)
        else:
            exchange.on_finished = self._count
            try:
                handler(exchange)
            except RequestError as error:
                _json(error.body(), exchange, error.code)

    def _authorized(self, path: str, headers: dict[str, str]) -> bool:
        """Return whether the API key is right; like vLLM, only paths under `/v1` need one."""
        key = self.settings.api_key
        if key is None or not path.startswith("/v1"):
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())

    def _count(self, exchange: Exchange) -> None:
        request = exchange.request
        duration_s = self._loop.time() - request.received_s
        self._tallies.count_http(request.path, request.method, exchange.status, duration_s)

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

    def _read(self, exchange: Exchange, shape: type[B]) -> B:
        request = exchange.request
        body = validate(shape, read_json(request.headers.get("content-type", ""), request.body))
        self._served.name_for(body.model)
        return body


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
