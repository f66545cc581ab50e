"""What the dashboard is sent: the events `history` and `snapshot` of `/admin/dashboard/events`.

Times are in seconds, rates per second, shares and ratios plain numbers (0.25, not 25). None stands for what is not
known: nothing has been observed, or the engine does not report it. There is no text of a request in any of it, no key,
no name of a key, and no address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

FORMAT = 1
"""Changes with the meaning of a field; new fields do not change it."""

SERIES = (
    "in_flight",
    "waiting",
    "kv_usage",
    "requests_per_s",
    "output_tokens_per_s",
    "step_s",
    "slowdown",
    "acceptance_rate",
    "tokens_per_step",
    "ttft_p50_s",
    "ttft_p95_s",
    "tpot_p50_s",
    "tpot_p95_s",
)
"""The numbers of a backend over time, in this order in `History` and in `BackendView.point`."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution over the last minutes, interpolated between the bounds of a histogram."""

    p50_s: float
    p95_s: float
    p99_s: float
    count: int  # number of values


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine last reported, of all its clients."""

    running: int
    waiting: int
    kv_usage: float  # share of the KV cache in use
    age_s: float  # age of the report


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of an engine, of all its clients."""

    rate: float  # accepted over drafted tokens
    tokens_per_step: float  # accepted tokens of a step that drafted, + 1
    # Share of the steps that drafted in which the draft token at each position was accepted, the first one first.
    by_position: list[float]
    drafts: int  # steps that drafted
    # Time over which this was counted; None: since the engine started, because it drafted nothing of late.
    window_s: float | None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Measured over predicted time to finish, of sampled requests for which the policy predicted one."""

    count: int
    # p10, p50, p90: quantiles of the ratio; 1 is a perfect prediction, above 1 the request took longer.
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class BackendView:
    """A backend."""

    name: str
    method: str
    k: int  # most tokens drafted per step; 0 for a baseline
    weight: float
    simulated: bool
    state: str  # one of `backends.backend.State`
    reason: str  # why it is in that state; empty if it is up
    outlier: str | None  # why the policy has taken it out as an outlier; None if it has not
    contradiction: str | None  # in which way its engine contradicts the pool file; None if it does not
    # Of the tokens per step that its answers show from those that its engine counts; None without.
    difference: str | None
    silence: str | None  # in which way its drafter is silent; None if it is not
    in_flight: int  # requests in flight, of all gateway processes and other clients
    in_flight_here: int  # those of this gateway process
    engine: Engine | None
    acceptance: Acceptance | None
    # Measured seconds per engine step: the mean time between two chunks of streams, over the last seconds.
    step_s: float | None
    fitted_step_s: float | None  # what the policy's fit expects at the present load, while no prompt is computed
    # Step time of the last requests over that expected at their load; None without any in the last minute.
    slowdown: float | None
    # requests_per_s, output_tokens_per_s, share: requests that ended and their output tokens, over the last minute;
    # share of the model's requests.
    requests_per_s: float
    output_tokens_per_s: float
    share: float | None
    failed: int  # requests that failed at it over the last minutes
    ttft: Quantiles | None
    tpot: Quantiles | None
    accuracy: Accuracy | None
    # Its newest values in the order of `SERIES`, to be appended to its history when `Snapshot.points_at_s` changes.
    point: list[float | None]


@dataclass(frozen=True, slots=True)
class Gain:
    """The comparison with `least_loaded`, by blocks of time under the one and the other."""

    # Time per unit of work of the policy over that of `least_loaded`; below 1 the policy is faster. None while it is
    # too early to tell.
    ratio: float | None
    # low, high: interval of the ratio, valid at any time it is looked at; None with it.
    low: float | None
    high: float | None
    confidence: float  # of the interval
    share: float  # share of the time in which `least_loaded` decides at present; 0: there is no comparison
    # own_blocks, control_blocks: blocks of time compared.
    own_blocks: int
    control_blocks: int
    needed_block_s: float | None  # how long blocks must be for the requests of late; None if they are long enough
    frozen: bool  # whether the policy was found to be worse, so that `least_loaded` decides


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the distilled rules."""

    version: int
    written_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """The versions of the distilled rules, oldest first; `/admin/dashboard/rules` has their text."""

    versions: list[Version]
    pinned: int | None  # version that decides in place of the policy; None if the policy itself does


@dataclass(frozen=True, slots=True)
class CandidateView:
    """A candidate of a decision."""

    backend: str
    score: float | None  # what the policy minimises, in its own unit (`learned`: seconds); None if it does not score
    predicted_s: float | None  # predicted seconds to finish
    propensity: float | None  # probability with which it was chosen
    in_flight: int  # requests in flight there when the choice was made


@dataclass(frozen=True, slots=True)
class RequestView:
    """The kind of a request: its features, as in `policies.features.request`, and nothing of its text."""

    endpoint: str
    stream: bool
    n: int
    temperature: float
    prompt_tokens: int
    max_tokens: int | None
    workload: str
    template: str
    overlap: float
    code_share: float
    turns: int
    structured: bool
    tools: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of a request."""

    outcome: str  # one of `gateway.telemetry.metrics.OUTCOMES`
    # Seconds from its arrival, or from the end of its wait in the gateway's queue, to the end of the answer.
    e2e_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    output_tokens: int | None
    tokens_per_step: float | None


@dataclass(slots=True)
class DecisionView:
    """A decision; a few a second are sampled while a dashboard is open."""

    number: int  # grows with each decision of the gateway process; the same decision is sent again until it has ended
    at_s: float  # seconds since 1970
    request: RequestView
    backend: str
    policy: str
    reason: str
    propensity: float
    predicted_s: float | None  # predicted seconds to finish on the chosen backend
    candidates: list[CandidateView]
    ended: Ended | None = None  # none while the request is in flight


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of a model in this gateway process."""

    waiting: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model."""

    name: str
    policy: str  # name of its policy
    # What decides at present: the name of the policy, `least_loaded` if it is frozen, or `rules, version 3`.
    decides: str
    simulated: bool
    requests_per_s: float  # arrivals at this gateway process
    queue: Queue | None
    backends: list[BackendView]
    gain: Gain | None
    # A `policies.learned.belief.Belief`, written before; None if the policy learns nothing.
    belief: orjson.Fragment | None
    rules: Rules | None  # none if the policy cannot be distilled
    decisions: list[DecisionView]  # the newest last


@dataclass(frozen=True, slots=True)
class Process:
    """The gateway process that serves the stream."""

    version: str
    started_s: float
    pid: int
    # Gateway processes on this address. With several, decisions, accuracies, gains, slowdowns and queues are those of
    # the process that serves the stream; what is counted is of all of them.
    workers: int
    dashboards: int  # streams open at this process
    window_s: float  # time over which quantiles are taken
    rate_window_s: float  # time over which rates, shares and acceptance are taken


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The event `snapshot`, sent about once a second."""

    format: int
    at_s: float  # seconds since 1970
    points_at_s: float  # time of the newest `BackendView.point`; it changes every few seconds
    process: Process
    models: list[ModelView]
    advice: list[Any] | None  # findings of `gateway advise`, of all models; None if nobody gives advice


@dataclass(frozen=True, slots=True)
class BackendHistory:
    """The past of a backend."""

    model: str
    backend: str
    # A list for each of `SERIES`, as long as `History.at_s`; not a number, in JSON null, where nothing is known.
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class History:
    """The event `history`, sent once, when a stream begins."""

    format: int
    series: tuple[str, ...]
    interval_s: float
    at_s: list[float]  # times of the points, oldest first, in seconds since 1970
    backends: list[BackendHistory]
