"""The service as a whole, over gRPC."""

from __future__ import annotations

import asyncio
import socket

import grpc

from gateway.picker.ext_proc_pb2 import HttpBody, ProcessingMode, ProcessingRequest, ProcessingResponse
from gateway.picker.server import SERVICE, PickerServer
from tests.gateway.picker.played_proxy import CHAT, PlayedProxy, http_headers
from tests.support.waiting import TIMEOUT_S


async def test_an_upload_that_does_not_end_is_refused() -> None:
    proxy = PlayedProxy({"server": {"body_s": 0.2}})
    picker = PickerServer(proxy.gateway, None)  # type: ignore[arg-type] # nothing here is for the gateway itself
    opened = socket.create_server(("127.0.0.1", 0))
    await picker.start(opened)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.getsockname()[1]}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/Process")()
            begun = ProcessingRequest(request_headers=http_headers([(":method", "POST"), (":path", CHAT)]))
            begun.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
            await stream.write(begun.SerializeToString())
            await stream.write(ProcessingRequest(request_body=HttpBody(body=b"{")).SerializeToString())
            async with asyncio.timeout(TIMEOUT_S):
                answer = ProcessingResponse.FromString(await stream.read())
            assert answer.immediate_response.status.code == 408
            assert await stream.read() is grpc.aio.EOF
    finally:
        await picker.stop(1.0)
