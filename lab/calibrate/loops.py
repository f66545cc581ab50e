"""Closed loops: as `gateway replay --live --concurrency` measured them, and as a replay plays them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from backends.calibration.calibration import Kind
from backends.speculation import Method
from backends.validation import UsageError
from lab.live.loops import EACH
from lab.past.served import ServedPart
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import replay_request
from lab.simulation.simulate import Replayed, replay
from lab.trace.record import TraceRecord

_MOST_BYTES = 256 << 20
_FEWEST_STEPS = 4
_MOST_REQUESTS = 2000  # of a loop; each is compared with each
_TURNAROUND_S = 0.002  # of a client


def read_loops(path: Path, kind: Kind) -> Iterator[ServedPart]:
    """Yield the closed loops of a file of `gateway replay --live --json`."""
    try:
        with path.open("rb") as file:
            document = orjson.loads(file.read(_MOST_BYTES))
        for loop in document["loops"]:
            if loop["method"] is not None and loop["each"]["steps"]:
                yield _loop(loop, kind)
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: is not what `gateway replay --live --json` writes: {error!r}") from None


def _loop(run: Mapping[str, Any], kind: Kind) -> ServedPart:
    columns = np.array([run["each"][name] for name in EACH], float)
    columns = columns[:, np.argsort(columns[0])][:, :_MOST_REQUESTS]
    *_, steps, ttft_s, e2e_s = columns
    columns = columns[:, (steps >= _FEWEST_STEPS) & (e2e_s > ttft_s)]
    if not columns.size:
        raise ValueError(f"no answer of {run['endpoint']} took {_FEWEST_STEPS} steps")
    accepted = run["acceptance"] or {"rate": 0.0, "tokens_per_step": 1.0, "by_position": ()}
    k = len(accepted["by_position"])
    return ServedPart(
        method=Method(run["method"]),
        config={"num_speculative_tokens": k} if k else {},
        concurrency=int(run["concurrency"]),
        **dict(zip(EACH, columns, strict=True)),
        kind=kind,
        temperature=run["temperature"],
        drafted=(accepted["tokens_per_step"] - 1.0) / accepted["rate"] if accepted["rate"] else float(k),
        by_position=tuple(map(float, accepted["by_position"])),
        kv_tokens=int(run["kv_tokens"]),
    )


def played(loop: ServedPart, calibration: str) -> Replayed:
    """Replay a loop with a calibration: the same requests, which take as many steps as measured."""
    requests = []
    for number, sizes in enumerate(zip(loop.prompt_tokens, loop.output_tokens, loop.steps, strict=True)):
        prompt_tokens, output_tokens, steps = map(int, sizes)
        taken = {loop.method.value: output_tokens / steps} if loop.k else {}
        record = TraceRecord(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            acceptance=taken,
            session=f"{number % loop.concurrency}",
            think_time_s=0.0,
        )
        requests.append(replay_request(record, 0.0, 0.0))
    replica = ReplicaSpec("measured", loop.method, loop.config, calibration)
    return replay([replica], requests, None, lookahead_s=_TURNAROUND_S)
