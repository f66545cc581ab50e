"""Measure the cost of recording: `python -m benchmarks.recorder`. Microseconds of CPU, best of nine.

Measured on chat requests with 2,000 characters of prompt and 128 tokens of answer, streamed or not, all different.
First the cost on the event loop (notes, and the part of the record that is made there); then in the recorder's thread,
which makes the rest of 32 records at a time; then the cost of packing and writing a record, and its size in the file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import orjson

from backends.backend import Backend, EngineLoad, State
from backends.speculation import Method
from benchmarks.choose import best_us
from benchmarks.describe import chat, prose
from gateway.config.settings import RecorderSettings
from gateway.http.usage import Usage
from gateway.recorder import FinishedRequest, Recorder, RequestNotes
from gateway.recorder.document import PendingRecord, RecordBuilder
from gateway.recorder.files import TraceFiles
from gateway.recorder.hashes import TextHasher
from gateway.routing.model import Model
from gateway.routing.router import RoutedRequest
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


def _begin(documents: RecordBuilder, batch: Sequence[FinishedRequest]) -> list[bytes | PendingRecord]:
    return [documents.begin(one, 0.0) for one in batch]


def _line(documents: RecordBuilder, one: FinishedRequest, wall_offset_s: float = 0.0) -> bytes:
    begun = documents.begin(one, wall_offset_s)
    if isinstance(begun, PendingRecord):
        (line,) = documents.end([begun])
        assert isinstance(line, bytes)
        return line
    return begun


def taken(
    backends: Sequence[Backend], policy: str, text: str, number: int = 0, *, streamed: bool = True
) -> FinishedRequest:
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
    take = RequestNotes([] if text != "none" else None, 1 << 20)
    take.note_candidates(backends)
    words = rng.choices(WRITTEN.split(), k=TOKENS)
    if not streamed:
        message = {"role": "assistant", "content": " ".join(words)}
        take.keep_document(Endpoint.CHAT, {"id": "chatcmpl-0", "choices": [{"index": 0, "message": message}]}, 1000)
    for index in range(TOKENS if streamed else 0):
        delta = {"choices": [{"index": 0, "delta": {"content": " " + words[index]}, "logprobs": None}]}
        data = orjson.dumps(
            {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "m", **delta}
        )
        take.chunks.append(100.0 + 0.02 * index + rng.uniform(0, 0.004))
        take.keep(b"data: " + data + b"\n\n")
    outcome = Outcome(features, decision, Method.NGRAM, 200, 0.1, 0.02, 3.0, 512, TOKENS, 2.1, 100, 60)
    usage = Usage(512, TOKENS, 0, 100, 60, 40, 0.1, 0.01, 2.9)
    prompt = read_prompt(orjson.loads(body)) if text == "hashes" else None
    routed, request_id = RoutedRequest(model, features, prompt=prompt), b"%032x" % rng.getrandbits(128)
    kept = body if text == "full" or policy == "round_robin" else b""
    return FinishedRequest(
        take, request_id, "team", routed, kept, decision, backends[1], "", 200, "ok", outcome, usage, 99.9, 103.0
    )


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

    def whole(recorder: Recorder, one: FinishedRequest) -> None:
        take = recorder.start_notes(Endpoint.CHAT)
        assert take is not None
        take.note_candidates(backends)
        take.keep_document(Endpoint.CHAT, answer, 900)
        recorder.add(
            FinishedRequest(
                take,
                one.request_id,
                one.key,
                one.routed,
                recorder.body_to_keep(one.routed, b""),
                one.decision,
                one.backend,
                one.retried_from,
                one.status,
                one.outcome_label,
                one.outcome,
                one.usage,
                one.arrived_s,
                time.perf_counter(),
            )
        )
        recorder._queue.clear()

    for text, into, ended in (("none", recorder, one), ("hashes", hashing, hashed)):
        took = best_us(partial(_repeat, partial(whole, into, ended)), 100)
        print(_LINE.format(f"event loop: notes and record, five candidates, text: {text}, in one piece", took))
    holder = [RequestNotes(None, 0)]

    def hundred() -> None:
        for _ in range(100):
            if (take := holder[0]) is not None:
                take.chunks.append(1.0)
                if take.answer is not None:
                    take.keep(b"")
        del holder[0].chunks[:]

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
