"""A pool of one replica of each of four methods, and requests to it."""

from __future__ import annotations

from backends.backend import Backend
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures


def pool() -> list[Backend]:
    drafted = {"baseline": 0, "ngram": 5, "suffix": 24, "eagle3": 3}
    return [
        Backend(name, "m", Method(name), "http://127.0.0.1:9", num_speculative_tokens=k) for name, k in drafted.items()
    ]


def request(**features: object) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, **features)  # type: ignore[arg-type]
