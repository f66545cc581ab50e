"""Compare how fleets follow days of traffic: `python -m benchmarks.fleet [--traffic NAME] [--data FOLDER] [--hours H]`.

Two days are replayed in virtual time, of which the second is judged, on simulated replicas, of which at most eight are
wanted at a time. `made` is chat, code and summaries, each with its own hours, on Llama-3.1-70B on four H100; `azure`
the same with rows of Azure's trace of 2023; `mooncake` its held-out half, `agents` held-out sessions in a closed loop
and `recorded` held-out requests with recorded steps, chat by day and code by night, on Llama-3.1-8B on an H100. FOLDER
has the folders `azure2023`, `mooncake`, `agent_sessions` and `specdecode_bench`, which are not part of the project.

Days are shortened to H hours and start-ups are not, so that traffic swings more steeply. A replica that is begun is
paid at once and serves three minutes later; one that is taken away gets nothing new, and is paid until its last answer
has ended. `learned` routes for all. `queue` is Kubernetes' rule on requests in flight for each replica, with one
method. The last columns are the replicas that are up in the mean from 0 to 6 h, and from 12 to
18 h.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path

from benchmarks.fleet.days import METHODS, MOST, START_UP_S, Days, Scaler, play
from benchmarks.fleet.traffic import TRAFFIC
from benchmarks.table import head, row
from gateway.rooms.fleet.model import ModelFleet

TARGET = 10
"""Requests in flight for each replica, by which Kubernetes' rule goes."""


def fixed(method: str, count: int) -> Scaler:
    """Return a fleet that stays."""
    return lambda days: Counter({method: count})


def on_queue(method: str) -> Scaler:
    """Return Kubernetes' rule on requests in flight, of which `TARGET` are wanted, with its five minutes' patience."""
    wanted: list[int] = []

    def scale(days: Days) -> Counter[str]:
        in_flight, count = sum(each.in_flight for _, each in days.up), max(1, len(days.up))
        ratio = in_flight / count / TARGET
        wanted.append(min(MOST, max(1, count if abs(ratio - 1.0) < 0.1 else math.ceil(count * ratio))))
        return Counter({method: max(wanted[-5:])})

    return scale


def by_fleet(day_minutes: int) -> Scaler:
    """Return what `gateway_replicas_needed` says, taken away after it said so for five minutes, as with KEDA."""
    fleet, past = ModelFleet(day_minutes, math.ceil(START_UP_S / 60.0)), []

    def scale(days: Days) -> Counter[str]:
        fleet.minutes.append(days.minutes[-1])
        fleet.judged = days.judged
        fleet.update(days.policy, days.up, days.cached())
        past.append(Counter(fleet.needed.counts or {method: MOST // len(METHODS) for method in METHODS}))
        wanted = Counter({method: max(each[method] for each in past[-5:]) for method in METHODS})
        while wanted.total() > MOST:
            wanted[max(METHODS, key=lambda method: wanted[method] - past[-1][method])] -= 1
        return wanted

    return scale


def main() -> None:
    """Print a row for each way to follow the traffic."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", choices=TRAFFIC, default="made")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--only", default="", help="pattern of the names of rows")
    given = parser.parse_args()
    traffic = TRAFFIC[given.traffic]
    requests = traffic.days(given.data, given.hours)
    print(f"{len(requests):,} requests", flush=True)
    scalers: dict[str, Scaler] = {}
    for method in METHODS:
        scalers |= {f"fixed, {count} {method}": fixed(method, count) for count in (8, 6)}
        scalers |= {f"queue, {method}": on_queue(method)}
    scalers |= {"fleet": by_fleet(round(given.hours * 60))}
    print(head("follows", "within the targets", "mean replicas", "0 to 6 h", "12 to 18 h"), flush=True)
    for name, scaler in scalers.items():
        if re.search(given.only, name):
            print(row(name, play(traffic, requests, given.hours, scaler)), flush=True)


if __name__ == "__main__":
    main()
