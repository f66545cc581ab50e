"""Sweeps over concurrency without speculation, with a fixed k and with adaptive verification: sweeps.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from backends.speculation import Method
from benchmarks.calibration.cases import Case, Closed, Collected, Group, LeftOut, Work

_FILE = Path(__file__).with_name("sweeps.yaml")
ROUNDS = 12
"""Requests of each client at most: a loop with few clients and hundreds of requests is as fast as one with fewer."""


def read() -> Collected:
    """Return the cases of all sweeps."""
    sweeps = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    left_out = [LeftOut(sweep["source"], **sweep["left_out"]) for sweep in sweeps if "left_out" in sweep]
    return Collected([case for sweep in sweeps for case in _cases(sweep)], left_out=left_out)


def _cases(sweep: dict[str, Any]) -> list[Case]:
    cases = []
    for label, figures in sweep["output_tok_s"].items():
        for clients, tok_s in zip(sweep["concurrency"], figures, strict=True):
            rounds = min(ROUNDS * clients, sweep.get("requests", ROUNDS * clients))
            cases.append(
                Case(
                    group=Group(sweep["setup"], sweep["source"], sweep["workload"], f"{clients}"),
                    label=label,
                    method=Method(label.split()[0]),
                    config=_config(label),
                    load=Closed(clients, clients * sweep["rounds"] if "rounds" in sweep else rounds),
                    work=Work(**sweep["work"]),
                    measured={"output_tok_s": tok_s},
                    temperature=sweep.get("temperature", 0.0),
                )
            )
    return cases


def _config(label: str) -> dict[str, Any]:
    """Return vLLM's speculative_config of `baseline`, `METHOD k=K`, or with adaptive verification `METHOD k<=K`."""
    _, _, depth = label.partition(" k")
    if not depth:
        return {}
    adaptive = {"enable_adaptive_verification": True} if depth.startswith("<") else {}
    return {"num_speculative_tokens": int(depth.lstrip("<="))} | adaptive
