"""Measure what a batch costs interactive requests, and what it makes of the rest: `python -m benchmarks.batches`.

In virtual time, with a simulated replica and the gateway's own rule (`gateway.rooms.batches.places`), asked each 50 ms
as there. Requests (Poisson) come for half of each cycle, so that the replica is alone in the other half; a batch of
50,000 lines, with prompts and answers as long as theirs, lies beside and lasts longer than the time that is measured.
Prints the P99 of the requests without and with the batch, and the tokens of lines that ended per second in which no
request was in flight, over those of a replica that runs nothing else and has all its places taken.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from random import Random

import numpy as np

from backends.calibration.load import load_calibration
from backends.drafting.script import Script, plain_steps
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from gateway.rooms.batches.lines import Line
from gateway.rooms.batches.places import WAIT_S, Places

_FULL_S = 120.0
"""Seconds after which a replica that runs nothing else has all its places taken."""
CALIBRATION, RATE, MOST = "llama-3.1-8b-h100", 6.0, 128
"""Requests per second while they come, and `batches.max_in_flight`."""
LINES, PROMPT, OUTPUT = 50_000, (50, 800), (32, 256)


@dataclass
class Run:
    """What happened in a run."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    lines: int = 0
    lost_lines: int = 0
    idle_s: float = 0.0  # with no request in flight

    def add(self, other: Run) -> None:
        """Add another run."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def p99_ms(self) -> tuple[float, float]:
        """Return the P99 of the time to the first token, and of that per token after it."""
        return 1e3 * float(np.quantile(self.ttft_s, 0.99)), 1e3 * float(np.quantile(self.tpot_s, 0.99))


def script(draws: Random) -> Script:
    """Return a request or a line."""
    output_tokens = draws.randint(*OUTPUT)
    return Script(draws.randint(*PROMPT), output_tokens, *plain_steps(output_tokens))


def arrivals(cycle_s: float, until_s: float, seed: int) -> list[tuple[float, Script]]:
    """Return the requests, in order."""
    draws, at_s, found = Random(seed), 0.0, list[tuple[float, Script]]()
    while (at_s := at_s + draws.expovariate(RATE)) < until_s:
        if at_s % cycle_s < cycle_s / 2:
            found.append((at_s, script(draws)))
    return found


def play(asked: list[tuple[float, Script]], until_s: float, most: int) -> Run:
    """Play requests, and as many lines beside them as may run, at most so many at once."""
    fleet, run, draws = Fleet([SimulatedReplica("a", load_calibration(CALIBRATION), Method.BASELINE)]), Run(), Random(2)
    waiting = [(Line(number, ""), script(draws)) for number in range(LINES if most else 0)]
    running, requests = dict[int, tuple[Line, Script, float]](), dict[int, tuple[float, Script]]()
    numbers, places, has_come = dict[Line, int](), Places(most, 0.0), False
    first_s, now_s, look_s = dict[int, float](), 0.0, 0.0
    coming = asked[::-1]
    while now_s < until_s:
        while coming and coming[-1][0] <= now_s:
            at_s, each = coming.pop()
            requests[fleet.submit_script(0, each, at_s)] = at_s, each
            has_come = True
        if now_s >= look_s:
            look_s = now_s + WAIT_S
            for line in places.look(now_s, is_shared=bool(requests), has_come=has_come):
                fleet.cancel(numbers[line])
                places.lines.pop(line)
                places.gave_up(line)
                waiting.append((line, running.pop(numbers.pop(line))[1]))
                run.lost_lines += 1
            has_come = False
            while waiting and places.may_begin(now_s, waiting[-1][0]):
                line, each = waiting.pop()
                number = numbers[line] = fleet.submit_script(0, each, now_s)
                running[number] = line, each, now_s
                places.lines[line] = None
        step = fleet.step(now_s)
        next_s = min([until_s, look_s if most else until_s, *(at_s for at_s, _ in coming[-1:])])
        end_s = next_s if step is None else now_s + step.duration_s
        run.idle_s += 0.0 if requests else end_s - now_s
        now_s = end_s
        for number, tokens, _, sent, left in () if step is None else step.emissions:
            if number in running and not left:
                line, each, begun_s = running.pop(number)
                places.lines.pop(line)
                places.answered(now_s - begun_s)
                numbers.pop(line)
                run.batch_tokens += each.output_tokens
                run.lines += 1
            elif number in requests:
                if sent == tokens:
                    first_s[number] = now_s
                if not left:
                    at_s, each = requests.pop(number)
                    run.ttft_s.append(first_s[number] - at_s)
                    run.tpot_s.append((now_s - first_s[number]) / (each.output_tokens - 1))
    return run


def main() -> None:
    """Print a row for each length of a cycle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cycle", type=float, nargs="*", default=[30.0, 120.0])
    options = parser.parse_args()
    half, whole = (play([], until_s, MOST) for until_s in (_FULL_S, 2 * _FULL_S))
    full = (whole.batch_tokens - half.batch_tokens) / _FULL_S  # tokens a second, once all places are taken
    for cycle_s in options.cycle:
        until_s = options.cycles * cycle_s
        alone, both = Run(), Run()
        for seed in range(options.seeds):
            asked = arrivals(cycle_s, until_s, seed)
            alone.add(play(asked, until_s, 0))
            both.add(play(asked, until_s, MOST))
        share = both.batch_tokens / both.idle_s / full
        (ttft_ms, tpot_ms), (with_ttft_ms, with_tpot_ms) = alone.p99_ms(), both.p99_ms()
        print(
            f"cycle {cycle_s:g} s: {len(alone.ttft_s)} requests, P99 TTFT {ttft_ms:.1f} -> {with_ttft_ms:.1f} ms",
            end=" ",
        )
        print(f"({with_ttft_ms / ttft_ms - 1:+.1%}), TPOT {tpot_ms:.2f} -> {with_tpot_ms:.2f} ms", end=" ")
        print(f"({with_tpot_ms / tpot_ms - 1:+.1%}); {both.lines} lines, {both.lost_lines} given up,", end=" ")
        print(f"{share:.1%} of an idle replica's tokens", flush=True)


if __name__ == "__main__":
    main()
