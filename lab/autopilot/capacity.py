"""How many requests a second some replicas can serve, by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lab.autopilot.journal import Speculation
from lab.autopilot.traffic import shifted
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, replay
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.load_policy import LoadSettings

_MOST = 1000
_DONE = 0.9
"""The last few requests run alone: the time in which this share of the tokens was generated counts."""


def requests_per_second(calibration: str, fleet: Mapping[str, Speculation], requests: Sequence[ReplayRequest]) -> float:
    """Return the throughput with full batches on the latest requests, when they all arrive at once.

    0 without replicas, or if these cannot serve the requests.
    """
    latest = shifted(requests[-_MOST:])
    pool = [ReplicaSpec(name, runs.method, runs.config, calibration) for name, runs in fleet.items()]
    if not pool or not latest:
        return 0.0
    played = replay(pool, latest, LeastLoaded(LoadSettings(seed=0)))
    if played.errors > (1 - _DONE) * len(latest):
        return 0.0
    order = np.argsort(played.e2e_s)
    done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
    return float(_DONE * len(latest) / played.e2e_s[order][np.searchsorted(done, _DONE)])
