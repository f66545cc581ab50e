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
    """A distribution over the last minutes, interpolated between the bounds of a histogram.

    Parameters
    ----------
    count
        Number of values.
    """

    p50_s: float
    p95_s: float
    p99_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine last reported, of all its clients.

    Parameters
    ----------
    kv_usage
        Share of the KV cache in use.
    age_s
        Age of the report.
    """

    running: int
    waiting: int
    kv_usage: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of an engine, of all its clients.

    Parameters
    ----------
    rate
        Accepted over drafted tokens.
    tokens_per_step
        Accepted tokens of a step that drafted, + 1.
    by_position
        Share of the steps that drafted in which the draft token at each position was accepted, the first one first.
    drafts
        Steps that drafted.
    window_s
        Time over which this was counted; None: since the engine started, because it drafted nothing of late.
    """

    rate: float
    tokens_per_step: float
    by_position: list[float]
    drafts: int
    window_s: float | None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Measured over predicted time to finish, of sampled requests for which the policy predicted one.

    Parameters
    ----------
    p10, p50, p90
        Quantiles of the ratio; 1 is a perfect prediction, above 1 the request took longer.
    """

    count: int
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class BackendView:
    """A backend.

    Parameters
    ----------
    k
        Most tokens drafted per step; 0 for a baseline.
    state
        One of `backends.backend.State`.
    reason
        Why it is in that state; empty if it is up.
    outlier
        Why the policy has taken it out as an outlier; None if it has not.
    contradiction
        In which way its engine contradicts the pool file; None if it does not.
    difference
        Of the tokens per step that its answers show from those that its engine counts; None without.
    silence
        In which way its drafter is silent; None if it is not.
    in_flight
        Requests in flight, of all gateway processes and other clients.
    in_flight_here
        Those of this gateway process.
    step_s
        Measured seconds per engine step: the mean time between two chunks of streams, over the last seconds.
    fitted_step_s
        What the policy's fit expects at the present load, while no prompt is computed.
    slowdown
        Step time of the last requests over that expected at their load; None without any in the last minute.
    requests_per_s, output_tokens_per_s, share
        Requests that ended and their output tokens, over the last minute; share of the model's requests.
    failed
        Requests that failed at it over the last minutes.
    point
        Its newest values in the order of `SERIES`, to be appended to its history when `Snapshot.points_at_s` changes.
    """

    name: str
    method: str
    k: int
    weight: float
    simulated: bool
    state: str
    reason: str
    outlier: str | None
    contradiction: str | None
    difference: str | None
    silence: str | None
    in_flight: int
    in_flight_here: int
    engine: Engine | None
    acceptance: Acceptance | None
    step_s: float | None
    fitted_step_s: float | None
    slowdown: float | None
    requests_per_s: float
    output_tokens_per_s: float
    share: float | None
    failed: int
    ttft: Quantiles | None
    tpot: Quantiles | None
    accuracy: Accuracy | None
    point: list[float | None]


@dataclass(frozen=True, slots=True)
class Gain:
    """The comparison with `least_loaded`, by blocks of time under the one and the other.

    Parameters
    ----------
    ratio
        Time per unit of work of the policy over that of `least_loaded`; below 1 the policy is faster. None while it is
        too early to tell.
    low, high
        Interval of the ratio, valid at any time it is looked at; None with it.
    confidence
        Of the interval.
    share
        Share of the time in which `least_loaded` decides at present; 0: there is no comparison.
    own_blocks, control_blocks
        Blocks of time compared.
    needed_block_s
        How long blocks must be for the requests of late; None if they are long enough.
    frozen
        Whether the policy was found to be worse, so that `least_loaded` decides.
    """

    ratio: float | None
    low: float | None
    high: float | None
    confidence: float
    share: float
    own_blocks: int
    control_blocks: int
    needed_block_s: float | None
    frozen: bool


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the distilled rules."""

    version: int
    written_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """The versions of the distilled rules, oldest first; `/admin/dashboard/rules` has their text.

    Parameters
    ----------
    pinned
        Version that decides in place of the policy; None if the policy itself does.
    pinned_before
        Earlier pins, oldest first.
    """

    versions: list[Version]
    pinned: int | None
    pinned_before: list[int | None]


@dataclass(frozen=True, slots=True)
class CandidateView:
    """A candidate of a decision.

    Parameters
    ----------
    score
        What the policy minimises, in its own unit (`learned`: seconds); None if it does not score.
    predicted_s
        Predicted seconds to finish.
    propensity
        Probability with which it was chosen.
    in_flight
        Requests in flight there when the choice was made.
    """

    backend: str
    score: float | None
    predicted_s: float | None
    propensity: float | None
    in_flight: int


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
    """What came of a request.

    Parameters
    ----------
    outcome
        One of `gateway.telemetry.metrics.OUTCOMES`.
    e2e_s
        Seconds from its arrival, or from the end of its wait in the gateway's queue, to the end of the answer.
    """

    outcome: str
    e2e_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    output_tokens: int | None
    tokens_per_step: float | None


@dataclass(slots=True)
class DecisionView:
    """A decision; a few a second are sampled while a dashboard is open.

    Parameters
    ----------
    number
        Grows with each decision of the gateway process; the same decision is sent again until it has ended.
    at_s
        Seconds since 1970.
    predicted_s
        Predicted seconds to finish on the chosen backend.
    ended
        None while the request is in flight.
    """

    number: int
    at_s: float
    request: RequestView
    backend: str
    policy: str
    reason: str
    propensity: float
    predicted_s: float | None
    candidates: list[CandidateView]
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of a model in this gateway process."""

    waiting: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model.

    Parameters
    ----------
    policy
        Name of its policy.
    decides
        What decides at present: the name of the policy, `least_loaded` if it is frozen, or `rules, version 3`.
    requests_per_s
        Arrivals at this gateway process.
    rules
        None if the policy cannot be distilled.
    belief
        A `policies.learned.belief.Belief`, written before; None if the policy learns nothing.
    decisions
        The newest last.
    """

    name: str
    policy: str
    decides: str
    simulated: bool
    requests_per_s: float
    queue: Queue | None
    backends: list[BackendView]
    gain: Gain | None
    belief: orjson.Fragment | None
    rules: Rules | None
    decisions: list[DecisionView]


@dataclass(frozen=True, slots=True)
class Process:
    """The gateway process that serves the stream.

    Parameters
    ----------
    workers
        Gateway processes on this address. With several, decisions, accuracies, gains, slowdowns and queues are those of
        the process that serves the stream; what is counted is of all of them.
    dashboards
        Streams open at this process.
    window_s
        Time over which quantiles are taken.
    rate_window_s
        Time over which rates, shares and acceptance are taken.
    """

    version: str
    started_s: float
    pid: int
    workers: int
    dashboards: int
    window_s: float
    rate_window_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The event `snapshot`, sent about once a second.

    Parameters
    ----------
    at_s
        Seconds since 1970.
    points_at_s
        Time of the newest `BackendView.point`; it changes every few seconds.
    advice
        Findings of `gateway advise`, of all models; None if nobody gives advice.
    """

    format: int
    at_s: float
    points_at_s: float
    process: Process
    models: list[ModelView]
    advice: list[Any] | None


@dataclass(frozen=True, slots=True)
class BackendHistory:
    """The past of a backend.

    Parameters
    ----------
    values
        A list for each of `SERIES`, as long as `History.at_s`; not a number, in JSON null, where nothing is known.
    """

    model: str
    backend: str
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class History:
    """The event `history`, sent once, when a stream begins.

    Parameters
    ----------
    at_s
        Times of the points, oldest first, in seconds since 1970.
    """

    format: int
    series: tuple[str, ...]
    interval_s: float
    at_s: list[float]
    backends: list[BackendHistory]
