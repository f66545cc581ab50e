"""Measure the cost of recording: `python -m benchmarks.recorder`. Microseconds of CPU, best of nine.

Measured on chat requests with 2,000 characters of prompt and 128 tokens of answer, streamed or not, all different.
First the cost on the event loop (notes, and the part of the record that is made there); then in the recorder's thread,
which makes the rest of 32 records at a time; then the cost of packing and writing a record, and its size in the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import orjson

from backends.backend import Backend, EngineLoad, State
from backends.http.address import Address
from backends.http.client import UpstreamClient
from backends.speculation import Method
from benchmarks.choose import best_us
from benchmarks.describe import chat, prose
from gateway.config.settings import RecorderSettings
from gateway.dialects.usage import Usage
from gateway.recorder import Recorder, RequestNotes
from gateway.recorder.document import PendingRecord, RecordBuilder
from gateway.recorder.files import TraceFiles
from gateway.recorder.hashes import TextHasher
from gateway.relay.observers import EndedExchange, Observer, Times
from gateway.routing.keys import Client
from gateway.routing.model import Model, Upstream
from gateway.routing.router import RoutedRequest
from gateway.telemetry.metrics import Metrics
from policies.features.prompt import read_prompt
from policies.features.request import Endpoint, describe
from policies.policy import CandidateScores, Decision, Outcome, policies

TOKENS = 128
WRITTEN = prose(60_000)
_AT_ONCE, _FRAME_BYTES = 32, 1 << 18
_IS_COMPILED = TextHasher(b"salt").is_quick
_LINE = "{:<64} {:>9.2f}"


def pool() -> list[Backend]:
    """Return five backends with some load."""
    methods = (Method.BASELINE, Method.NGRAM, Method.SUFFIX, Method.EAGLE3, Method.DRAFT_MODEL)
    load = EngineLoad(running=4, waiting=1, kv_usage=0.2, at_s=1.0)
    return [Backend(m.value, "m", m, "http://127.0.0.1:1", state=State.UP, in_flight=3, load=load) for m in methods]


def _documents(text: str) -> RecordBuilder:
    """Return the maker of records, as a recorder has it."""
    if text != "hashes":
        return RecordBuilder(text)
    return RecordBuilder(text, TextHasher(b"salt"), TextHasher(b"salt") if _IS_COMPILED else None)


Finished = tuple[RequestNotes, EndedExchange]


def _begin(documents: RecordBuilder, batch: Sequence[Finished]) -> list[bytes | PendingRecord]:
    return [documents.begin(notes, ended, 0.0) for notes, ended in batch]


def _line(documents: RecordBuilder, one: Finished, wall_offset_s: float = 0.0) -> bytes:
    begun = documents.begin(*one, wall_offset_s)
    if isinstance(begun, PendingRecord):
        (line,) = documents.end([begun])
        assert isinstance(line, bytes)
        return line
    return begun


def taken(backends: Sequence[Backend], policy: str, text: str, number: int = 0, *, streamed: bool = True) -> Finished:
    """Return a finished request, as the exchange passes it to the recorder."""
    rng = Random(number)
    begin = rng.randrange(50_000)
    body = orjson.dumps(chat(WRITTEN[begin : begin + 2000], temperature=0.7, max_tokens=256))
    kind = policies()[policy]
    model = Model("m", kind(kind.Settings()), 1.0, {})
    features = describe(
        Endpoint.CHAT, orjson.loads(body), model="m", default_temperature=1.0, qps=12.5, in_flight=9, workload="chat"
    )
    considered = CandidateScores(backends, [1.234567] * len(backends), [0.2] * len(backends))
    decision = Decision("ngram", policy, "fastest", 0.9, considered)
    kept = body if text == "full" or policy == "round_robin" else b""
    notes = RequestNotes(lambda *_: None, kept, keeps_answer=text != "none", max_bytes=1 << 20)
    notes.on_send(decision, backends)
    words = rng.choices(WRITTEN.split(), k=TOKENS)
    if not streamed:
        message = {"role": "assistant", "content": " ".join(words)}
        notes.on_answer(b" " * 1000, {"id": "chatcmpl-0", "choices": [{"index": 0, "message": message}]})
    for index in range(TOKENS if streamed else 0):
        delta = {"choices": [{"index": 0, "delta": {"content": " " + words[index]}, "logprobs": None}]}
        data = orjson.dumps(
            {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "m", **delta}
        )
        notes.on_chunk(b"data: " + data + b"\n\n", 100.0 + 0.02 * index + rng.uniform(0, 0.004))
    outcome = Outcome(features, decision, Method.NGRAM, 200, 0.1, 0.02, 3.0, 512, TOKENS, 2.1, 100, 60)
    usage = Usage(512, TOKENS, 0, 100, 60, 40, 0.1, 0.01, 2.9)
    prompt = read_prompt(orjson.loads(body)) if text == "hashes" else None
    routed, request_id = RoutedRequest(model, features, prompt=prompt), b"%032x" % rng.getrandbits(128)
    upstream = Upstream(backends[1], UpstreamClient(Address.parse("http://127.0.0.1:1")), Metrics().bind(backends[1]))
    times = Times(99.9, 100.0, 102.9, 103.0) if streamed else Times(99.9, ended_s=103.0)
    ended = EndedExchange(
        request_id, Client("team"), routed, decision, upstream, "", 200, "ok", times, usage, None, outcome
    )
    notes.on_end(ended)
    return notes, ended


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(100):
        call()


def event_loop(folder: Path) -> None:
    """Print the cost of a request and of a stream's chunk on the event loop."""
    backends = pool()
    recorder = Recorder(RecorderSettings(path=folder, queue=100))  # not started: the queue is emptied here
    one = taken(backends, "thresholds", "none")
    hashing = Recorder(RecorderSettings(path=folder, text="hashes", queue=100))
    hashed = taken(backends, "thresholds", "hashes", streamed=False)
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": WRITTEN[:700]}}]}

    def whole(recorder: Recorder, one: Finished) -> None:
        ended = one[1]
        notes = recorder.follow(ended.routed, b"")
        assert notes is not None
        notes.on_send(ended.decision or Decision("", "", ""), backends)
        notes.on_answer(b" " * 900, answer)
        notes.on_end(ended)
        recorder._queue.clear()

    for text, into, ended in (("none", recorder, one), ("hashes", hashing, hashed)):
        took = best_us(partial(_repeat, partial(whole, into, ended)), 100)
        print(_LINE.format(f"event loop: notes and record, five candidates, text: {text}, in one piece", took))
    observers: list[Observer] = [RequestNotes(lambda *_: None, keeps_answer=False)]

    def hundred() -> None:
        for _ in range(100):
            for observer in observers:
                observer.on_chunk(b"", 1.0)
        observers[0] = RequestNotes(lambda *_: None, keeps_answer=False)

    print(_LINE.format("event loop: a chunk of a stream", best_us(hundred, 100)))


def records(folder: Path) -> None:
    """Print the cost of a record on the event loop and in the thread, and its size."""
    backends = pool()
    print()
    for policy in ("thresholds", "round_robin"):
        for text in ("none", "hashes", "full"):
            for streamed in (True, False):
                documents = _documents(text)
                batch = [taken(backends, policy, text, number, streamed=streamed) for number in range(_AT_ONCE)]
                waiting = [one for one in _begin(documents, batch) if isinstance(one, PendingRecord)]
                documents.end(waiting)
                kept = "" if policy == "thresholds" else ", features computed by the recorder"
                kind = f"text: {text}, {'a stream' if streamed else 'in one piece'}{kept}"
                print(_LINE.format(f"event loop: {kind}", best_us(partial(_begin, documents, batch), _AT_ONCE)))
                if waiting:
                    print(_LINE.format(f"thread:     {kind}", best_us(partial(documents.end, waiting), _AT_ONCE)))
    print()
    hasher, words, draw = TextHasher(b"salt"), WRITTEN.split(), Random(7)
    begins = [draw.randrange(50_000) for _ in range(_AT_ONCE)]
    pairs = [(WRITTEN[begin : begin + 2000], " ".join(draw.choices(words, k=TOKENS))) for begin in begins]
    print(_LINE.format("hashes, all units known", best_us(partial(hasher.pack_all, pairs), _AT_ONCE)))
    for text in ("none", "hashes", "full"):
        documents = _documents(text)
        first = _line(documents, taken(backends, "thresholds", text))
        lines = [
            _line(documents, taken(backends, "thresholds", text, number), number * 0.37)
            for number in range(_FRAME_BYTES // len(first))
        ]
        files = TraceFiles(RecorderSettings(path=folder))
        frame = b"".join(lines)
        took, packed = best_us(partial(files.write, frame), len(lines)), files.write(frame) / len(lines)
        files.close()
        print(f"packing, text: {text:<7} {took:>6.2f} us; {len(first):>6} bytes plain, {packed:>6.0f} packed")


def main() -> None:
    """Print all measurements."""
    with tempfile.TemporaryDirectory() as folder:
        event_loop(Path(folder))
        records(Path(folder))


if __name__ == "__main__":
    main()
