"""The recorder: whatever client and engine send, each record is a line that the reader of traces accepts.

The first byte chooses endpoint, texts, whether the engine streams, and whether the rest describes documents
(`tests.fuzz.documents`). The rest is the body of the request, a zero byte, and the answer.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import orjson

from backends.backend import Backend
from backends.health import HealthRules
from backends.http.address import Address
from backends.http.client import UpstreamClient
from backends.pool import Pool
from backends.speculation import Method
from gateway.dialects.errors import GatewayError
from gateway.dialects.usage import read_usage
from gateway.relay.observers import EndedExchange
from gateway.rooms.recorder.document import RecordBuilder, RequestNotes
from gateway.rooms.recorder.hashes import TextHasher
from gateway.routing.access import read_head
from gateway.routing.keys import ANONYMOUS
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Router
from gateway.routing.series import RequestSeries
from gateway.telemetry.registry import Registry
from lab.trace.read import read_trace
from policies.policy import Decision, Outcome, policies
from tests.fuzz.documents import document

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_TEXTS = ("none", "hashes", "full", "hashes")
_MAX_BYTES = 1 << 16
_backend = Backend("b", "m", Method.NGRAM, "http://127.0.0.1:1")
_series = RequestSeries(Registry()).of(_backend)
_upstream = Upstream(_backend, UpstreamClient(Address.parse("http://127.0.0.1:1")), _series)
_kind = policies()["thresholds"]
_model = Model("m", _kind(_kind.Settings()), 1.0, {"b": _upstream})
_router = Router({"m": _model}, Pool([_backend], HealthRules()), 1_500_000)
_router.keep_prompts(_MAX_BYTES)
_scratch = tempfile.TemporaryDirectory(prefix="fuzz-record-")
_file = Path(_scratch.name) / "trace.jsonl"


@dataclass
class _Built:
    text: str
    builder: RecordBuilder


_builders = [_Built(text, RecordBuilder(text, TextHasher(b"salt"), TextHasher(b"salt"))) for text in _TEXTS]


def fuzz_one(data: bytes) -> None:
    """Record a request, and read the record."""
    flags, rest = (data[0], data[1:]) if data else (0, b"")
    body, _, answer = rest.partition(b"\0")
    if flags & 64:
        body, answer = document(body), document(answer)
    streams, built = bool(flags & 16), _builders[flags >> 2 & 3]
    try:
        path = _PATHS[flags & 3]
        head = read_head("POST", ANONYMOUS, path, path.encode(), [])
        routed = _router.route(head, body, 1.0, whole=bool(flags & 32))
    except GatewayError:
        return
    notes = RequestNotes(lambda _notes, _ended: None, body, keeps_answer=built.text != "none", max_bytes=_MAX_BYTES)
    decision = Decision("b", "thresholds", "rule", 0.75, candidates=[_backend], predicted_s=[1.25], propensities=[0.75])
    notes.on_send(decision, [_backend])
    parsed: object = None
    if streams:
        for at, event in enumerate(answer.split(b"\n\n")):
            notes.on_chunk(event + b"\n\n", 10.0 + at)
    else:
        parsed = _parsed(answer)
        notes.on_answer(answer, parsed)
    usage = read_usage(parsed)
    tokens = (usage.output_tokens if usage else None) or 0
    outcome = Outcome(routed.features, decision, Method.NGRAM, 200, 1.0, 0.25, 2.0, 9, tokens, None, 6, 2)
    ended = EndedExchange(b"\xffid", ANONYMOUS, 9.0)
    ended.routed, ended.decision, ended.upstream, ended.outcome = routed, decision, _upstream, outcome
    ended.status, ended.label, ended.usage = 200, "ok", usage
    ended.first_s, ended.last_s, ended.ended_s = 10.0, 10.75, 11.0
    notes.on_end(ended)
    line = built.builder.begin(notes, ended, 0.0)
    if line is None:
        assert notes.size_bytes >= 0
        line = built.builder.end(notes)
    assert line.count(b"\n") == 1
    _file.write_bytes(line)
    (record,) = read_trace(_file, format="gateway", strict=True)
    assert record.model == "m"


def _parsed(answer: bytes) -> object:
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
