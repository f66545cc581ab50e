"""vLLM production-stack: the values of its Helm chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.validation import UsageError
from gateway.importer.configuration import Configuration, Replica, name_of, url_of
from gateway.importer.document import section
from gateway.importer.engine import K_VARIABLE, speculation_of
from gateway.importer.flags import Flags
from gateway.importer.pool_text import Variable

_POLICIES = {
    "roundrobin": "round_robin",
    "session": "learned",
    "prefixaware": "learned",
    "kvaware": "learned",
    "priority": "least_loaded",
}


def read(values: Mapping[str, Any], release: str) -> Configuration:
    """Return what the chart's values describe: a source for each of its deployments of an engine."""
    configuration = Configuration()
    engines, router = section(values, "servingEngineSpec"), section(values, "routerSpec")
    if not engines and not router:
        raise UsageError("has neither servingEngineSpec nor routerSpec: expected the values.yaml of production-stack")
    if router.get("serviceDiscovery") == "static":
        configuration.replicas += _static(router)
    else:
        port = _number(engines, "containerPort", 8000)
        for index, spec in enumerate(_list(engines, "modelSpec")):
            if not isinstance(spec, Mapping) or not spec.get("name") or not spec.get("modelURL"):
                raise UsageError(f"servingEngineSpec.modelSpec[{index}]: expected name and modelURL")
            if spec.get("enabled", True):
                configuration.replicas.append(_engine(spec, release, port))
        configuration.placeholders[K_VARIABLE] = "1"
        configuration.note(
            f"replicas are found by the services of the release {release} (--release), whatever their number: "
            "the gateway needs deploy/kubernetes-rbac.yaml"
        )
    configuration.put("server", "host", "0.0.0.0")
    configuration.put("server", "port", _number(router, "containerPort", 8000))
    logic = str(router.get("routingLogic") or "roundrobin")
    if logic == "disaggregated_prefill":
        raise UsageError("routes prefill and decode apart: the gateway needs replicas that do both")
    configuration.set_policy("routerSpec.routingLogic", logic, _POLICIES)
    key = engines.get("vllmApiKey") or router.get("vllmApiKey")
    is_reference = isinstance(key, Mapping)
    if key and (not is_reference or key.get("secretName")):
        where = f"the secret {key['secretName']}" if is_reference else "vllmApiKey, which is not repeated here"
        _protect(configuration, where)
    if _number(router, "replicaCount", 1) > 1:
        configuration.note("routerSpec.replicaCount: several gateways share what they learn through state.redis")
    for flag in Flags(_words(router)).names:
        configuration.note(f"routerSpec.extraArgs {flag}: not kept")
    return configuration


def _static(router: Mapping[str, Any]) -> list[Replica]:
    urls, models = (str(router.get(key) or "").split(",") for key in ("staticBackends", "staticModels"))
    if len(urls) != len(models):
        raise UsageError(f"has {len(urls)} static backends and {len(models)} static models: expected as many")
    replicas = []
    for text, model in zip(urls, models, strict=True):
        url = url_of(text)
        if url is None:
            raise UsageError("routerSpec.staticBackends: expected addresses such as http://10.0.0.1:8000")
        replicas.append(Replica(name_of(url), model.strip(), {"url": url}))
    return replicas


def _engine(spec: Mapping[str, Any], release: str, port: int) -> Replica:
    if section(spec, "lmcacheConfig").get("enablePD"):
        raise UsageError(
            f"modelSpec {spec['name']} does prefill or decode only: the gateway needs replicas that do both"
        )
    flags = Flags(_words(section(spec, "vllmConfig")))
    model, *aliases = flags.values("--served-model-name") or [str(spec["modelURL"])]
    service = {"service": f"{release}-{spec['name']}-engine-service", "port": port}
    return Replica(
        name_of(str(spec["name"])), model, {"kubernetes": service}, aliases, speculation=speculation_of(flags)
    )


def _protect(configuration: Configuration, where: str) -> None:
    """Set the key of all replicas, and require it of clients too: without it anyone could use the replicas."""
    key = Variable.of("VLLM_API_KEY")
    for replica in configuration.replicas:
        replica.api_key = key
    configuration.settings["keys"] = [{"name": "engines", "key": key}]
    configuration.note(f"VLLM_API_KEY is the key of the engines, from {where}; clients need it too")


def _words(part: Mapping[str, Any]) -> list[str]:
    return [str(word) for word in _list(part, "extraArgs")]


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
