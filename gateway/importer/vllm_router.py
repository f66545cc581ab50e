"""vllm-router, the router in Rust of the vLLM project: its command line."""

from __future__ import annotations

from backends.validation import UsageError
from gateway.config.pool_text import Variable
from gateway.importer.configuration import Configuration, Router
from gateway.importer.flags import Flags

COMMANDS = ("vllm-router", "vllm_router")
"""Words that tell its command line."""

_PREFILL_DECODE = ("--vllm-pd-disaggregation", "--prefill", "--decode", "--mini-lb")
_NUMBERS = {
    "--max-concurrent-requests": ("server", "max_in_flight"),
    "--request-timeout-secs": ("timeouts", "total_s"),
    "--health-check-interval-secs": ("health", "interval_s"),
    "--health-check-timeout-secs": ("health", "timeout_s"),
}


def read(flags: Flags, model: str | None, service: str | None) -> Configuration:
    """Return what vllm-router was started with."""
    configuration = Configuration(Router.of("vllm-router"))
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
    for flag in flags.rest():
        configuration.note(configuration.router.not_kept(flag))
    return configuration


def _settings(flags: Flags, configuration: Configuration) -> None:
    configuration.put("server", "host", flags.text("--host") or "127.0.0.1")
    configuration.put("server", "port", flags.number("--port") or 30000)
    configuration.set_policy("--policy", flags.text("--policy") or "cache_aware")
    for flag, (section, key) in _NUMBERS.items():
        if (number := flags.number(flag)) is not None:
            configuration.put(section, key, number)
    if (eject_s := flags.number("--cb-timeout-duration-secs")) is not None:
        configuration.set_ejection(eject_s)
    if (body_bytes := flags.number("--max-payload-size")) is not None:
        configuration.set_body_limit(body_bytes / 2**20)
    if origins := flags.values("--cors-allowed-origins"):
        configuration.settings["cors"] = {"origins": origins}
