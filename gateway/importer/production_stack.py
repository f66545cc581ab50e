"""vLLM production-stack: the flags of its router, and the values of its Helm chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.validation import UsageError
from gateway.config.pool_text import Variable
from gateway.config.short_forms import name_of
from gateway.importer.configuration import MAY_LIST, Configuration, Replica, Router
from gateway.importer.engine import K_VARIABLE, speculation_of
from gateway.importer.flags import Flags, flags_of, read_mapping, section

COMMANDS = ("vllm-router", "vllm_router")

_PREFILL_DECODE = "disaggregated_prefill"


def read(words: Sequence[str], model: str | None, service: str | None, release: str) -> Configuration:
    """Return what a production-stack was configured with."""
    if len(words) == 1 and words[0].endswith((".yaml", ".yml")):
        return _chart(read_mapping(Path(words[0])), service, release)
    configuration = Configuration(Router.of("production-stack"))
    _router(flags_of(words, COMMANDS), configuration, model, service)
    return configuration


def _router(flags: Flags, configuration: Configuration, model: str | None, service: str | None) -> None:
    """Add what the router's flags say."""
    discovery = flags.text("--service-discovery")
    backends, models = flags.listed("--static-backends"), flags.listed("--static-models")
    if discovery is None and not backends:
        raise UsageError("has neither --static-backends nor --service-discovery: expected the flags of the router")
    configuration.put("server", "host", flags.text("--host") or "0.0.0.0")
    configuration.put("server", "port", flags.number("--port") or 8001)
    if discovery == "k8s":
        selector, namespace = flags.text("--k8s-label-selector") or "", flags.text("--k8s-namespace")
        configuration.add_labelled(model, service, selector, flags.number("--k8s-port") or 8000, namespace)
    elif len(backends) != len(models):
        raise UsageError(f"has {len(backends)} static backends and {len(models)} static models: expected as many")
    else:
        for url, name in zip(backends, models, strict=True):
            configuration.add_static("--static-backends", url, name)
    for pair in flags.listed("--static-aliases"):
        alias, _, name = pair.partition(":")
        for replica in [replica for replica in configuration.replicas if replica.model == name][:1]:
            replica.renamed.append(alias)
    routing(flags.text("--routing-logic"), configuration)
    if (timeout_s := flags.number("--backend-health-check-timeout-seconds")) is not None:
        configuration.put("health", "timeout_s", timeout_s)
    for flag in flags.rest():
        configuration.note(configuration.router.not_kept(flag))


def routing(logic: str | None, configuration: Configuration) -> None:
    """Set the policy for a `--routing-logic`."""
    if logic == _PREFILL_DECODE:
        raise UsageError("routes prefill and decode apart: the gateway needs replicas that do both")
    configuration.set_policy("--routing-logic", logic or "roundrobin")


def _chart(values: Mapping[str, Any], service: str | None, release: str) -> Configuration:
    """Return what the chart's values describe: a source for each of its deployments of an engine."""
    configuration = Configuration(Router.of("production-stack"))
    engines, router = section(values, "servingEngineSpec"), section(values, "routerSpec")
    if not engines and not router:
        raise UsageError("has neither servingEngineSpec nor routerSpec: expected the values.yaml of production-stack")
    words = [str(word) for word in _list(router, "extraArgs")]
    if router.get("serviceDiscovery") == "static":
        words += ["--static-backends", str(router.get("staticBackends") or "")]
        words += ["--static-models", str(router.get("staticModels") or "")]
        _router(Flags(words), configuration, None, service)
    else:
        for flag in Flags(words).rest():
            configuration.note(f"routerSpec.extraArgs {configuration.router.not_kept(flag)}")
        port = _number(engines, "containerPort", 8000)
        for index, spec in enumerate(_list(engines, "modelSpec")):
            if not isinstance(spec, Mapping) or not spec.get("name") or not spec.get("modelURL"):
                raise UsageError(f"servingEngineSpec.modelSpec[{index}]: expected name and modelURL")
            if spec.get("enabled", True):
                configuration.replicas.append(_engine(spec, release, port, configuration))
    configuration.put("server", "host", "0.0.0.0")
    configuration.put("server", "port", _number(router, "containerPort", 8000))
    routing(str(router.get("routingLogic") or "roundrobin"), configuration)
    key = engines.get("vllmApiKey") or router.get("vllmApiKey")
    is_reference = isinstance(key, Mapping)
    if key and (not is_reference or key.get("secretName")):
        configuration.protect(Variable.of("VLLM_API_KEY"))
        where = f"the secret {key['secretName']}" if is_reference else "vllmApiKey, which is not repeated here"
        configuration.note(f"VLLM_API_KEY is the key of the engines, from {where}")
    if _number(router, "replicaCount", 1) > 1:
        configuration.note("routerSpec.replicaCount: several gateways share what they learn through state.redis")
    if any("kubernetes" in replica.where for replica in configuration.replicas):
        configuration.note(
            f"replicas are found by the services of the release {release} (--release), whatever number; {MAY_LIST}"
        )
    return configuration


def _engine(spec: Mapping[str, Any], release: str, port: int, configuration: Configuration) -> Replica:
    config = section(spec, "vllmConfig")
    flags = Flags([str(word) for word in _list(config, "extraArgs")])
    names = flags.values("--served-model-name") or [str(spec["modelURL"])]
    service = f"{release}-{spec['name']}-engine-service"
    replica = Replica(name_of(str(spec["name"])), names[0], {"kubernetes": {"service": service, "port": port}})
    replica.aliases += names[1:]
    replica.speculation = speculation_of(flags)
    configuration.placeholders[K_VARIABLE] = "1"
    if section(spec, "lmcacheConfig").get("enablePD"):
        raise UsageError(
            f"modelSpec {spec['name']} does prefill or decode only: the gateway needs replicas that do both"
        )
    return replica


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    values = part.get(name) or []
    if not isinstance(values, list):
        raise UsageError(f"{name}: expected a list")
    return values


def _number(part: Mapping[str, Any], name: str, default: int) -> int:
    value = part.get(name) or default
    if not str(value).isdecimal():
        raise UsageError(f"{name}: expected a number")
    return int(value)
