"""The process that replays lookups: texts come on its standard input, one answer a text goes to its standard output.

First comes a line of JSON, a list of the arms to replay. A text is a line of JSON (`endpoint`, `streamed`, and the
lengths `body` and `answer`), and then those bytes. Its answer is a line of JSON: `shadow`, tokens per step by arm, and
`cpu_s`. It ends where its input does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import orjson

from backends.drafting import suffix_jit
from backends.speculation import Method
from gateway.http.transcript import read_answer
from policies.features.prompt import read_prompt
from policies.features.request import Endpoint
from policies.features.words import piece_ids
from policies.learned.shadow_drafting import ShadowArm, replayed

_FEWEST_UNITS = 8


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    arms = [ShadowArm(**arm | {"method": Method(arm["method"])}) for arm in orjson.loads(source.readline() or b"[]")]
    if any(arm.method is Method.SUFFIX for arm in arms):
        suffix_jit.load()  # 0.7 s and 130 MiB, and each text then takes a thirtieth of its time
    while head := source.readline():
        asked: dict[str, Any] = orjson.loads(head)
        body, answer = source.read(asked["body"]), source.read(asked["answer"])
        began_s = time.process_time()
        try:
            shadow = replayed_text(asked, body, answer, arms)
            told: dict[str, Any] = {"tokens_per_step": shadow, "cpu_s": time.process_time() - began_s}
        except (ValueError, ArithmeticError, LookupError, TypeError) as error:
            told = {"error": repr(error), "cpu_s": time.process_time() - began_s}
        sink.write(orjson.dumps(told) + b"\n")
        sink.flush()


def replayed_text(asked: dict[str, Any], body: bytes, answer: bytes, arms: Sequence[ShadowArm]) -> dict[str, float]:
    """Return the tokens per step of each arm; nothing for a text too short to tell.

    On token ids, where the request brought them or the engine was asked to return them; else on pieces of the text.
    """
    endpoint = Endpoint(asked["endpoint"])
    document = orjson.loads(body)
    if not isinstance(document, dict):
        return {}
    transcript = read_answer(endpoint, answer, stream=asked["streamed"])
    prompt = read_prompt(document)
    prompt_ids, output_ids = transcript.prompt_token_ids or prompt.ids, transcript.token_ids
    if not (prompt_ids and output_ids):
        prompt_ids, output_ids = piece_ids("\n".join(prompt.pieces), transcript.text)
    if not prompt_ids or len(output_ids) < _FEWEST_UNITS:
        return {}
    return replayed(prompt_ids, output_ids, arms)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the gateway tells when it is over
    os.nice(19)  # requests come first: where no core is idle it has a seventieth of one
    main(sys.stdin.buffer, sys.stdout.buffer)
