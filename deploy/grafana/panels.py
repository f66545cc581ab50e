"""The panels of Grafana's dashboards: what they show, and the expressions.

Every panel sums over the gateways that are chosen, except where its title says that it is by gateway. What several
gateways report of one replica (its batch, its cache) is averaged instead: they all see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GATEWAY = 'job=~"$job",instance=~"$instance"'
MODEL = f'{GATEWAY},model=~"$model"'
BACKEND = f'{MODEL},backend=~"$backend"'
BY_BACKEND = "{{backend}} ({{method}})"
NO_EVENTS = " or on () vector(0)"  # a counter of rare events begins with the first one


@dataclass(frozen=True)
class Panel:
    """One chart.

    Parameters
    ----------
    queries
        Expressions, each with its legend.
    unit
        Unit in Grafana's names.
    """

    title: str
    text: str
    unit: str
    queries: Sequence[tuple[str, str]]
    is_stacked: bool = False


def rate(series: str, labels: str = BACKEND, by: str = "backend, method") -> str:
    """Return the sum of the rates of a counter."""
    return f"sum by ({by}) (rate({series}{{{labels}}}[$__rate_interval]))"


def ratio(above: str, below: str, labels: str = BACKEND, by: str = "backend, method") -> str:
    """Return the ratio of two counters' rates, without a value where the lower one stands still."""
    return f"{rate(above, labels, by)} / ({rate(below, labels, by)} > 0)"


def quantile(share: float, histogram: str, labels: str = BACKEND, by: str = "backend, method") -> str:
    """Return a quantile of a histogram."""
    of = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', labels, of)})"


def quantiles(histogram: str) -> list[tuple[str, str]]:
    """Return the queries for the usual quantiles over all chosen replicas."""
    return [(quantile(share, histogram, by=""), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)]


def seen(gauge: str, labels: str = BACKEND, by: str = "backend, method") -> str:
    """Return the mean of what gateways report of a replica."""
    return f"avg by ({by}) ({gauge}{{{labels}}})"


BASELINE = f'{MODEL},method="baseline"'
SENT = f'{BACKEND},backend!=""'  # refused requests have no backend, and ".*" matches none too
TPOT, ITL = "gateway_tpot_seconds", "gateway_itl_seconds"
MEAN_STEP = ratio(f"{ITL}_sum", f"{ITL}_count", f'{BACKEND},method!="baseline"', "model, backend, method")
BASELINE_STEP = ratio(f"{ITL}_sum", f"{ITL}_count", BASELINE, "model")
BREAK_EVEN = f"({MEAN_STEP}) / on (model) group_left () ({BASELINE_STEP})"
TIME_OF_BASELINES = ratio(f"{TPOT}_sum", f"{TPOT}_count", BASELINE, "model")
TIME_OF_OTHERS = ratio(f"{TPOT}_sum", f"{TPOT}_count", f'{MODEL},method!="baseline"', "model")
REQUESTS, STEPS, STEP_TOKENS = "gateway_requests_total", "gateway_steps_total", "gateway_step_tokens_total"
SLO, KEPT = "gateway_slo_requests_total", f'{MODEL},outcome="kept"'

TRAFFIC = [
    Panel("Requests", "By outcome.", "reqps", [(rate(REQUESTS, MODEL, "outcome"), "{{outcome}}")], is_stacked=True),
    Panel("Requests by replica", "Where they went.", "reqps", [(rate(REQUESTS, SENT), BY_BACKEND)], is_stacked=True),
    Panel(
        "In flight",
        "Requests that the gateways have sent and that have not ended.",
        "short",
        [(f"sum by (backend, method) (gateway_in_flight{{{BACKEND}}})", BY_BACKEND)],
        is_stacked=True,
    ),
    Panel(
        "Tokens",
        "Of prompts and answers, per second.",
        "short",
        [
            (rate("gateway_prompt_tokens_total", BACKEND, "model"), "{{model}} prompt"),
            (rate("gateway_output_tokens_total", BACKEND, "model"), "{{model}} output"),
        ],
    ),
    Panel(
        "Reasons of decisions",
        "Why replicas were chosen, as policies say.",
        "reqps",
        [(rate("gateway_decisions_total", MODEL, "policy, reason"), "{{policy}}: {{reason}}")],
        is_stacked=True,
    ),
    Panel(
        "Failures",
        "Requests that ended in a 5xx or broke off, and those sent to a second replica.",
        "reqps",
        [
            (rate(REQUESTS, f'{MODEL},outcome=~"engine_error|unanswered|interrupted"', "outcome"), "{{outcome}}"),
            (rate("gateway_retries_total", MODEL, "kind") + NO_EVENTS, "retry: {{kind}}"),
            (rate("gateway_retries_refused_total", MODEL, "model"), "{{model}}: retry budget spent"),
        ],
    ),
    Panel(
        "Replicas that may take requests",
        "The fewest that a gateway sees, and all.",
        "short",
        [
            (f"min by (model) (sum by (model, job, instance) (gateway_backend_up{{{MODEL}}}))", "{{model}} up"),
            (f"max by (model) (count by (model, job, instance) (gateway_backend_up{{{MODEL}}}))", "{{model}} all"),
        ],
    ),
    Panel(
        "Traffic over what is carried",
        "Of models with `slo`: above 1 the replicas that are up are too few to keep it.",
        "percentunit",
        [(f"max by (model) (gateway_pool_saturation{{{MODEL}}})", "{{model}}")],
    ),
    Panel(
        "Replicas needed",
        "Of models with `slo`, to keep it, after an hour of traffic.",
        "short",
        [(f"max by (model, method) (gateway_replicas_needed{{{MODEL}}})", "{{model}} {{method}}")],
    ),
    Panel(
        "Time to finish on the replicas needed",
        "Of the last hour's requests: measured on the replicas that were up, and expected on those needed.",
        "s",
        [(f"avg by (model, replicas) (gateway_fleet_request_seconds{{{MODEL}}})", "{{model}} {{replicas}}")],
    ),
    Panel(
        "Queue of the gateway",
        "For models with a queue.",
        "short",
        [
            (f"sum by (model) (gateway_queue_length{{{MODEL}}})", "{{model}} waiting"),
            (
                rate("gateway_queue_refused_total", MODEL, "model, reason") + NO_EVENTS,
                "{{model}} {{reason}} per second",
            ),
        ],
    ),
]

SPECULATION = [
    Panel(
        "Speedup over baseline",
        "Time per output token of the baselines over that of all replicas that speculate; above 1 speculation wins. "
        "Policies give them different work.",
        "short",
        [(f"({TIME_OF_BASELINES}) / ({TIME_OF_OTHERS})", "{{model}}")],
    ),
    Panel(
        "Tokens per step",
        "By the engines' counters, including steps without a draft; 1 without speculation.",
        "short",
        [(seen("gateway_backend_tokens_per_step"), BY_BACKEND)],
    ),
    Panel(
        "Tokens per step over break-even",
        "Break-even is the time of a step over that of a baseline's. Below 1 the drafts cost more than they give.",
        "short",
        [(f"({seen('gateway_backend_tokens_per_step', by='model, backend, method')}) / ({BREAK_EVEN})", BY_BACKEND)],
    ),
    Panel(
        "Acceptance",
        "Accepted over drafted tokens, by the engines' counters.",
        "percentunit",
        [(seen("gateway_backend_acceptance_ratio"), BY_BACKEND)],
    ),
    Panel(
        "Tokens per step by temperature",
        "As the answers show.",
        "short",
        [(ratio(STEP_TOKENS, STEPS, BACKEND, "method, temperature"), "{{method}} at {{temperature}}")],
    ),
    Panel(
        "Time of a step", "Between two chunks of a stream.", "s", [(ratio(f"{ITL}_sum", f"{ITL}_count"), BY_BACKEND)]
    ),
    Panel(
        "Learned policy against least_loaded",
        "Time per unit of work, from blocks of time under the one and the other, by gateway; below 1 the policy wins. "
        "Nothing while it is too early to tell. 1 at `frozen`: least_loaded routes instead.",
        "short",
        [
            (f"gateway_policy_ratio_to_least_loaded{{{MODEL}}}", "{{model}} {{instance}}"),
            (f"max by (model) (gateway_policy_frozen{{{MODEL}}})", "{{model}} frozen"),
        ],
    ),
    Panel(
        "Replicas that do not behave as their method should",
        "1 if one is an outlier, its drafter is silent, or its engine is not what the pool file says.",
        "short",
        [
            (f"max by (model, backend) (gateway_backend_outlier_ejected{{{BACKEND}}})", "{{backend}} outlier"),
            (
                f"max by (backend, cause) (gateway_backend_drafter_silent{{{BACKEND}}} == 1){NO_EVENTS}",
                "{{backend}} silent {{cause}}",
            ),
            (
                f"max by (backend, kind) (gateway_backend_contradiction{{{BACKEND}}} == 1){NO_EVENTS}",
                "{{backend}} not as said: {{kind}}",
            ),
        ],
    ),
    Panel(
        "Batch and cache of the engines",
        "As the engines report; the mean of what gateways see.",
        "short",
        [
            (seen("gateway_backend_running"), f"{BY_BACKEND} running"),
            (seen("gateway_backend_waiting"), f"{BY_BACKEND} waiting"),
            (seen("gateway_backend_kv_usage_ratio"), f"{BY_BACKEND} KV cache"),
        ],
    ),
]

LATENCY = [
    Panel(
        "Time to the first token",
        "Streams, of all chosen replicas.",
        "s",
        quantiles("gateway_ttft_seconds"),
    ),
    Panel(
        "Time to the first token by replica",
        "95th percentile.",
        "s",
        [(quantile(0.95, "gateway_ttft_seconds"), BY_BACKEND)],
    ),
    Panel("Time per output token", "Of all chosen replicas.", "s", quantiles(TPOT)),
    Panel("Time per output token by replica", "Median.", "s", [(quantile(0.5, TPOT), BY_BACKEND)]),
    Panel("Time to finish", "To the end of the answer.", "s", quantiles("gateway_e2e_seconds")),
    Panel(
        "Requests within their objective",
        "Share of those with one, by class; `default` is the `slo` of the model.",
        "percentunit",
        [
            (
                f"{rate(SLO, KEPT, 'model, slo_class')} / ({rate(SLO, MODEL, 'model, slo_class')} > 0)",
                "{{model}} {{slo_class}}",
            )
        ],
    ),
    Panel(
        "Time to the first token of requests with an objective",
        "95th percentile, by class.",
        "s",
        [(quantile(0.95, "gateway_slo_ttft_seconds", MODEL, "model, slo_class"), "{{model}} {{slo_class}}")],
    ),
    Panel(
        "Unevenness",
        "99th percentile of the time to the first token over its median.",
        "short",
        [
            (
                f"{quantile(0.99, 'gateway_ttft_seconds', MODEL, 'model')} / "
                f"{quantile(0.5, 'gateway_ttft_seconds', MODEL, 'model')}",
                "{{model}}",
            )
        ],
    ),
    Panel(
        "Time in the gateway",
        "From the last byte of a request to its sending.",
        "s",
        [(quantile(share, "gateway_overhead_seconds", MODEL, ""), f"p{100 * share:g}") for share in (0.5, 0.99)],
    ),
    Panel(
        "Wait in the queue of the gateway",
        "Of requests that waited and were then sent; 95th percentile.",
        "s",
        [(quantile(0.95, "gateway_queue_wait_seconds", MODEL, "model"), "{{model}}")],
    ),
]

OPERATION = [
    Panel(
        "Other processes known, by gateway",
        "Workers and gateways of the pool.",
        "short",
        [(f"gateway_peers{{{GATEWAY}}}", "{{instance}}")],
    ),
    Panel(
        "Stored state, by gateway",
        "1 if it is stored and shared.",
        "short",
        [(f"gateway_state_connected{{{GATEWAY}}}", "{{instance}} {{store}}")],
    ),
    Panel(
        "Age of what is stored, by gateway",
        "Since the last exchange with the store.",
        "s",
        [(f"time() - gateway_state_last_sync_timestamp_seconds{{{GATEWAY}}}", "{{instance}}")],
    ),
    Panel(
        "Reloads",
        "In the last hour, by outcome.",
        "short",
        [(f"sum by (outcome) (increase(gateway_reloads_total{{{GATEWAY}}}[1h]))", "{{outcome}}")],
    ),
    Panel(
        "Replicas found",
        "By source, and answers of sources by outcome.",
        "short",
        [
            (f"max by (model, source) (gateway_discovered_backends{{{MODEL}}}){NO_EVENTS}", "{{model}} {{source}}"),
            (
                rate("gateway_discoveries_total", MODEL, "source, outcome") + NO_EVENTS,
                "{{source}} {{outcome}} per second",
            ),
        ],
    ),
    Panel(
        "Recorder",
        "Records by result.",
        "reqps",
        [(rate("gateway_recorder_records_total", GATEWAY, "result"), "{{result}}")],
        is_stacked=True,
    ),
    Panel(
        "Telemetry",
        "Requests reported, by signal and result.",
        "reqps",
        [(rate("gateway_telemetry_requests_total", GATEWAY, "signal, result"), "{{signal}} {{result}}")],
    ),
    Panel(
        "Tokens by key",
        "Prompt and output tokens, per second.",
        "short",
        [(rate("gateway_key_tokens_total", GATEWAY, "key"), "{{key}}")],
        is_stacked=True,
    ),
]

DASHBOARDS = {
    "traffic": ("Gateway: traffic", TRAFFIC),
    "speculation": ("Gateway: speculation", SPECULATION),
    "latency": ("Gateway: latency", LATENCY),
    "operation": ("Gateway: operation", OPERATION),
}
