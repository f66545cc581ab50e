"""The routers in Rust of vLLM and SGLang, one made of the other: their command lines."""

from __future__ import annotations

from collections.abc import Sequence

from backends.validation import UsageError
from gateway.config.pool_text import Variable
from gateway.importer.configuration import Configuration, Router
from gateway.importer.flags import Flags, flags_of

COMMANDS = {
    "vllm-router": ("vllm-router", "vllm_router"),
    "sglang-router": ("sglang-router", "sglang_router", "smg launch"),
}
"""Words that tell the command line of each."""

_PREFILL_DECODE = ("--vllm-pd-disaggregation", "--pd-disaggregation", "--prefill", "--decode", "--mini-lb")
_NUMBERS = {
    "--max-concurrent-requests": ("server", "max_in_flight"),
    "--request-timeout-secs": ("timeouts", "total_s"),
    "--health-check-interval-secs": ("health", "interval_s"),
    "--health-check-timeout-secs": ("health", "timeout_s"),
}


def read(router: str, words: Sequence[str], model: str | None, service: str | None) -> Configuration:
    """Return what a router, one of `COMMANDS`, was started with."""
    flags = flags_of(words, COMMANDS[router])
    configuration = Configuration(Router.of(router))
    has_prefill = any(flag in flags for flag in _PREFILL_DECODE)
    workers = flags.values("--worker-urls")
    if has_prefill and not workers:
        raise UsageError("has prefill and decode workers only: the gateway needs replicas that do both")
    if not workers and "--service-discovery" not in flags:
        raise UsageError(f"has neither --worker-urls nor --service-discovery: expected the flags of {router}")
    if has_prefill:
        configuration.note("--prefill, --decode: left out; the gateway needs replicas that do both")
    if router == "sglang-router":
        configuration.note("engines of SGLang have other metrics than vLLM: the gateway goes by what it sees itself")
        model = model or flags.text("--model-path")
    for worker in workers:
        configuration.add_static("--worker-urls", worker, model)
    if "--service-discovery" in flags:
        port, namespace = flags.number("--service-discovery-port"), flags.text("--service-discovery-namespace")
        configuration.add_labelled(model, service, " ".join(flags.values("--selector")), port or 80, namespace)
    if "--api-key-validation-urls" in flags:
        configuration.require_key("--api-key-validation-urls")
    if "--api-key" in flags:
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
        if (number := flags.number(flag)) not in {None, -1}:  # -1: no limit
            configuration.put(section, key, number)
    if (eject_s := flags.number("--cb-timeout-duration-secs")) is not None:
        configuration.set_ejection(eject_s)
    if (body_bytes := flags.number("--max-payload-size")) is not None:
        configuration.set_body_limit(body_bytes / 2**20)
    if origins := flags.values("--cors-allowed-origins"):
        configuration.settings["cors"] = {"origins": origins}
