"""vllm-router, the router in Rust of the vLLM project: its command line."""

from __future__ import annotations

from backends.validation import UsageError
from gateway.importer.configuration import Configuration
from gateway.importer.flags import Flags
from gateway.importer.pool_text import Variable

COMMANDS = ("vllm-router", "vllm_router")
"""Words that tell its command line."""

_POLICIES = {
    "random": ("random", ""),
    "round_robin": ("round_robin", ""),
    "power_of_two": ("power_of_two", ""),
    "cache_aware": ("learned", "was cache_aware: learned remembers which replica got prompts that begin alike"),
    "kv_aware": ("learned", "was kv_aware: learned remembers which replica got prompts that begin alike"),
    "consistent_hash": ("learned", "was consistent_hash: learned remembers which replica had the conversation"),
    "sticky_least_loaded": (
        "learned",
        "was sticky_least_loaded: learned remembers which replica had the conversation",
    ),
}
_PREFILL_DECODE = ("--vllm-pd-disaggregation", "--prefill", "--decode", "--mini-lb")
_NUMBERS = {
    "--max-concurrent-requests": ("server", "max_in_flight"),
    "--request-timeout-secs": ("timeouts", "total_s"),
    "--health-check-interval-secs": ("health", "interval_s"),
    "--health-check-timeout-secs": ("health", "timeout_s"),
}

_REASONS = {
    "--retry": "the gateway sends a request a second time at most, to another replica",
    "--disable-retries": "the gateway sends a request a second time, to another replica, before its answer has begun",
    "--cb-": "three strikes of different requests eject a replica (health)",
    "--disable-circuit": "three strikes of different requests eject a replica (health)",
    "--health-": "a refused connection counts at once, a time-out when it is the second in a row",
    "--intra-node-data-parallel-size": "vLLM spreads requests over the ranks of a replica itself",
    "--prefill": "there is no disaggregated prefill",
    "--decode": "there is no disaggregated prefill",
    "--vllm-": "there is no disaggregated prefill",
    "--kv-": "learned remembers which replica got which prompts",
    "--pd-": "there is no disaggregated prefill",
    "--cache-threshold": "learned weighs the prefix against the load itself",
    "--balance-": "learned weighs the prefix against the load itself",
    "--eviction": "learned bounds what it remembers of prefixes itself",
    "--max-tree-size": "learned bounds what it remembers of prefixes itself",
    "--queue-": "the gateway has a queue for each model: models.NAME.queue",
    "--rate-limit": "limits belong to keys: keys[].requests_per_minute",
    "--prometheus-": "metrics are at /metrics; admin.listen gives them an address of their own",
    "--request-id-headers": "requests are told by x-request-id",
    "--log-": "",
    "--enable-igw": "a pool has any number of models",
    "--worker-startup": "replicas that start are waited for, without a limit",
}


def read(flags: Flags, model: str | None, service: str | None) -> Configuration:
    """Return what vllm-router was started with."""
    configuration = Configuration()
    has_prefill = any(flag in flags for flag in _PREFILL_DECODE)
    workers = flags.values("--worker-urls")
    if has_prefill and not workers:
        raise UsageError("has prefill and decode workers only: the gateway needs replicas that do both")
    if not workers and "--service-discovery" not in flags:
        raise UsageError("has neither --worker-urls nor --service-discovery: expected the flags of vllm-router")
    if has_prefill:
        configuration.note("--prefill, --decode: left out; the gateway needs replicas that do both")
    key = flags.text("--api-key")
    for worker in workers:
        configuration.add_static("--worker-urls", worker, model)
    if "--service-discovery" in flags:
        port, namespace = flags.number("--service-discovery-port"), flags.text("--service-discovery-namespace")
        configuration.add_labelled(model, service, " ".join(flags.values("--selector")), port or 80, namespace)
    if key is not None:
        configuration.protect(Variable.of("VLLM_API_KEY"))
    _settings(flags, configuration)
    flags.note_rest(_REASONS, configuration.note)
    return configuration


def _settings(flags: Flags, configuration: Configuration) -> None:
    configuration.put("server", "host", flags.text("--host") or "127.0.0.1")
    configuration.put("server", "port", flags.number("--port") or 30000)
    configuration.set_policy("--policy", flags.text("--policy") or "cache_aware", _POLICIES)
    for flag, (section, key) in _NUMBERS.items():
        if (number := flags.number(flag)) is not None:
            configuration.put(section, key, number)
    if (eject_s := flags.number("--cb-timeout-duration-secs")) is not None:
        configuration.set_ejection(eject_s)
    if (body_bytes := flags.number("--max-payload-size")) is not None:
        configuration.set_body_limit(body_bytes / 2**20)
    if origins := flags.values("--cors-allowed-origins"):
        configuration.settings["cors"] = {"origins": origins}
