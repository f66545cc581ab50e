"""Schemas of the objects of the Gateway API and its inference extension that the chart and the manifests have.

No package for Python has them, so they are written here from the published references, as far as our objects go. What
is not named is refused, so that a misspelt field is found.

References
----------
.. [1] Gateway API, "API specification", `gateway.networking.k8s.io/v1`, https://gateway-api.sigs.k8s.io/reference/spec/
.. [2] Gateway API Inference Extension, "API Reference", `inference.networking.k8s.io/v1`,
   https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_LABEL = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _list(items: dict[str, Any], most: int, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_METADATA = _object(
    ("name",),
    name=_NAME,
    namespace=_NAME,
    labels={"type": "object", "additionalProperties": _LABEL},
    annotations={"type": "object", "additionalProperties": {"type": "string"}},
)
_TIMEOUTS = _object(request=_DURATION, backendRequest=_DURATION)
_PATH = _object(type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value={"type": "string", "pattern": "^/"})
_PARENT = _object(("name",), group=_NAME, kind=_LABEL, namespace=_NAME, name=_NAME, sectionName=_NAME, port=_PORT)
_BACKEND = _object(
    ("name",),
    group={"const": "inference.networking.k8s.io"},
    kind={"const": "InferencePool"},
    name=_NAME,
    namespace=_NAME,
    weight={"type": "integer", "minimum": 0, "maximum": 1_000_000},
)

SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        ("selector", "targetPorts", "endpointPickerRef"),
        selector=_object(
            ("matchLabels",),
            matchLabels={"type": "object", "additionalProperties": _LABEL, "minProperties": 1, "maxProperties": 64},
        ),
        targetPorts=_list(_object(("number",), number=_PORT), 8) | {"uniqueItems": True},
        endpointPickerRef=_object(
            ("name", "port"),  # of a Service, which is the default kind
            name=_NAME,
            port=_object(("number",), number=_PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        parentRefs=_list(_PARENT, 32),
        hostnames=_list(_NAME, 16),
        rules=_list(
            _object(matches=_list(_object(path=_PATH), 64), backendRefs=_list(_BACKEND, 16), timeouts=_TIMEOUTS), 16
        ),
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): _object(
        ("gatewayClassName", "listeners"),
        gatewayClassName=_NAME,
        listeners=_list(
            _object(("name", "port", "protocol"), name=_NAME, port=_PORT, protocol={"enum": ["HTTP", "HTTPS"]}), 64
        ),
    ),
}


def validate(found: dict[str, Any]) -> None:
    """Check an object by its schema.

    Raises
    ------
    jsonschema.ValidationError
        If a field is wrong, missing or not known.
    """
    spec = SCHEMAS[found["apiVersion"], found["kind"]]
    whole = _object(("metadata", "spec"), apiVersion={}, kind={}, metadata=_METADATA, spec=spec)
    Draft202012Validator(whole).validate(found)
