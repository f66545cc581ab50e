"""The features of a recorded request, as a policy saw them."""

from __future__ import annotations

from lab.trace.record import TraceRecord
from policies.features.request import Endpoint, RequestFeatures

_AS_RECORDED = (
    "temperature", "top_p", "overlap", "code_share", "turns", "structured", "tools", "stream", "qps", "in_flight",
)  # fmt: skip
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


def features_of(record: TraceRecord) -> RequestFeatures:
    """Return the features of a recorded request as a policy saw them, with defaults for missing ones.

    Examples
    --------
    >>> features_of(TraceRecord(prompt_tokens=12, overlap=0.5)).overlap
    0.5
    """
    known = {name: value for name in _AS_RECORDED if (value := getattr(record, name)) is not None}
    return RequestFeatures(
        model=record.model,
        endpoint=_ENDPOINTS.get(record.endpoint, Endpoint.CHAT),
        n=record.n,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        template=record.template,
        workload=record.workload,
        baseline_only=tuple(record.baseline_only),
        **known,
    )
