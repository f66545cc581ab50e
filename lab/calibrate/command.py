"""Implementation of `gateway calibrate`: measured closed loops, and the calibration that fits them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
import yaml
from rich.table import Table

from backends.calibration.calibration import Calibration, Kind
from backends.calibration.load import load_calibration
from backends.drafting.script import BLOCK_TOKENS
from backends.files.regular import read_file
from backends.speculation import Method
from backends.validation import UsageError
from lab.calibrate.options import CalibrateOptions
from lab.past.fit import fitted
from lab.past.served import EACH, FEWEST_STEPS, ServedPart
from lab.report.terminal import report, text_table, write_file
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import replay_request
from lab.simulation.simulate import Replayed, replay
from lab.trace.record import TraceRecord

_MOST_BYTES = 256 << 20
_MOST_REQUESTS = 2000  # of a loop; every pair is compared
_TURNAROUND_S = 0.002  # of a client
_LONG_S = 3600.0  # until the loop starts


def read_loops(path: Path, kind: Kind) -> Iterator[ServedPart]:
    """Yield the closed loops in a file of `gateway replay --live --json`."""
    try:
        for loop in orjson.loads(read_file(path, _MOST_BYTES))["loops"]:
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
    columns = columns[:, (steps >= FEWEST_STEPS) & (e2e_s > ttft_s)]
    if not columns.size:
        raise ValueError(f"no answer of {run['endpoint']} took {FEWEST_STEPS} steps")
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
    """Replay a loop with a calibration: the same requests, with as many steps as measured.

    The cached part of each prompt is a prefix of one text, which is sent first.
    """
    records, most = list[TraceRecord](), int(loop.cached_tokens.max())
    if most:
        blocks = range(most // BLOCK_TOKENS)
        records.append(
            TraceRecord(prompt_tokens=most + 1, output_tokens=1, prefix_blocks=blocks, block_tokens=BLOCK_TOKENS)
        )
    columns = loop.prompt_tokens, loop.cached_tokens, loop.output_tokens, loop.steps
    for number, sizes in enumerate(zip(*columns, strict=True)):
        prompt_tokens, cached_tokens, output_tokens, steps = map(int, sizes)
        record = TraceRecord(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_blocks=range(cached_tokens // BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            acceptance={loop.method.value: output_tokens / steps} if loop.k else {},
            session=f"{number % loop.concurrency}",
            think_time_s=0.0,
        )
        records.append(record)
    requests = [replay_request(each, _LONG_S if each.session else 0.0, 0.0) for each in records]
    replica = ReplicaSpec("measured", loop.method, loop.config, calibration)
    return replay([replica], requests, None, lookahead_s=_TURNAROUND_S, warmup=1 if most else 0)


_HEAD = """\
# Made by `gateway calibrate` of {files}.
# {errors}
# Correct what you know better: limits of the scheduler, names, acceptance of methods that were not measured.
"""


def run_calibrate(options: CalibrateOptions) -> int:
    """Make a calibration, given the command line's options."""
    loops = [loop for given in options.measured for loop in read_loops(*_file(given))]
    if not loops:
        raise UsageError("no closed loop of a known method: replay with --concurrency, and --live METHOD=URL")
    try:
        like = load_calibration(options.like)
        longest = max(int((loop.prompt_tokens + loop.output_tokens).max()) for loop in loops)
        limits = {"max_model_len": max(longest, like.scheduler.max_model_len)}  # including held-out loops
        own = {"hardware": options.hardware, "target": options.target or like.target}
        like = like.model_copy(update=own | {"scheduler": like.scheduler.model_copy(update=limits)})
        errors, measured, tables = _held_out(loops, like)
        document = fitted(loops, like)
    except ValueError as error:
        raise UsageError(str(error)) from error
    least, most = min(loop.concurrency for loop in loops), max(loop.concurrency for loop in loops)
    engine = f"`gateway calibrate` at {least} to {most} requests at once"
    document["measured"] = {"engine": engine, "is_own": True, **measured}
    text = yaml.safe_dump(document, sort_keys=False, width=120)
    write_file(options.out, (_HEAD.format(files=", ".join(options.measured), errors=errors) + text).encode())
    report("gateway calibrate", [errors, f"{options.out} is fitted to all.", "", *tables])
    return 0


def _file(given: str) -> tuple[Path, Kind]:
    kind, named, path = given.partition("=")
    if named and kind not in set(Kind):
        raise UsageError(f"{given}: no kind of text is called {kind!r}; the kinds are {', '.join(Kind)}")
    return (Path(path), Kind(kind)) if named else (Path(given), Kind.CHAT)


def _held_out(loops: Sequence[ServedPart], like: Calibration) -> tuple[str, dict[str, float], list[Table]]:
    """Return how well a fit to every other concurrency predicts the rest: words, fields of `Measured`, a table."""
    levels = sorted({loop.concurrency for loop in loops})
    if len(levels) < 2:
        return "Its error is not known: none of one concurrency can be held out.", {}, []
    headings = [heading for name in ("tpot, ms", "ttft, ms") for heading in (name, "simulated", "error")]
    table = text_table(["held out", "at once", *headings], left=1)
    errors = []
    with TemporaryDirectory(prefix="gateway-calibrate-") as folder:
        half = Path(folder) / "half.yaml"
        half.write_text(yaml.safe_dump(fitted([loop for loop in loops if loop.concurrency in levels[::2]], like)))
        for loop in (loop for loop in loops if loop.concurrency in levels[1::2]):
            ours = played(loop, str(half))
            if ours.errors:
                which = f"{ours.errors} requests of {loop.method} at {loop.concurrency} at once"
                raise ValueError(f"{which} do not fit into its memory: name one of as large a machine with --like")
            pairs = [(np.median(getattr(loop, name)), np.median(getattr(ours, name))) for name in ("tpot_s", "ttft_s")]
            errors.append([simulated / real - 1.0 for real, simulated in pairs])
            figures = zip(pairs, errors[-1], strict=True)
            cells = [f"{1e3 * real:.2f} {1e3 * ours:.2f} {error:+.1%}" for (real, ours), error in figures]
            table.add_row(loop.method.value, f"{loop.concurrency}", *" ".join(cells).split())
    tpot, ttft = np.abs(np.array(errors)).T
    fit, others = (", ".join(map(str, levels[start::2])) for start in (0, 1))
    said = (
        f"Fitted to {fit} at once, the TPOT at {others} is off by {np.median(tpot):.1%} in the median and by at most "
        f"{tpot.max():.1%}, the TTFT by {np.median(ttft):.1%}."
    )
    return said, {"figures": len(tpot), "error": float(np.median(tpot)), "most": float(tpot.max())}, [table]
