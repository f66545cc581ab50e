"""The process that replays drafting on texts from standard input and writes one result per text to standard output.

The first line is a JSON list of the arms to replay. Each text is a line of JSON (`endpoint`, `streamed`, and the
lengths `body` and `answer` in bytes), followed by those bytes. Its result is a line of JSON: `cpu_s`, and
`tokens_per_step` by arm or `error`. The process ends with its input.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import orjson

from backends.speculation import Method
from gateway.dialects.json_body import decoded_body
from gateway.dialects.transcript import read_answer
from gateway.telemetry.log_format import place_of
from policies.features.prompt import read_prompt
from policies.features.request import Endpoint
from policies.learned.shadow_drafting import ShadowArm, piece_ids, replayed

_MIN_TOKENS = 8


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Replay texts until the input ends."""
    arms = [ShadowArm(**arm | {"method": Method(arm["method"])}) for arm in orjson.loads(source.readline() or b"[]")]
    while head := source.readline():
        text: dict[str, Any] = orjson.loads(head)
        body, answer = source.read(text["body"]), source.read(text["answer"])
        began_s = time.process_time()
        try:
            tokens_per_step = replayed_text(text, body, answer, arms)
            result: dict[str, Any] = {"tokens_per_step": tokens_per_step, "cpu_s": time.process_time() - began_s}
        except Exception as error:  # noqa: BLE001 -- the process serves all texts
            result = {"error": place_of(error), "cpu_s": time.process_time() - began_s}
        sink.write(orjson.dumps(result) + b"\n")
        sink.flush()


def replayed_text(text: dict[str, Any], body: bytes, answer: bytes, arms: Sequence[ShadowArm]) -> dict[str, float]:
    """Return the tokens per step of each arm; empty if the text is too short.

    It uses token ids if request and answer contain them, else pieces of the text.
    """
    endpoint = Endpoint(text["endpoint"])
    document = decoded_body(body)
    if not isinstance(document, dict):
        return {}
    transcript = read_answer(endpoint, answer, stream=text["streamed"])
    prompt = read_prompt(document)
    prompt_ids, output_ids = transcript.prompt_token_ids or prompt.ids, transcript.token_ids
    if not (prompt_ids and output_ids):
        prompt_ids, output_ids = piece_ids("\n".join(prompt.pieces), transcript.text)
    if not prompt_ids or len(output_ids) < _MIN_TOKENS:
        return {}
    return replayed(prompt_ids, output_ids, arms)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the gateway ends this one
    os.nice(19)  # requests come first: on a busy machine, this gets a seventieth of a core
    main(sys.stdin.buffer, sys.stdout.buffer)
