"""The schema of the chart's values, in which `pool` is what a pool file is."""

from __future__ import annotations

import json

from gateway.config.schema import pool_schema

_ID = "pool.schema.json"


def values_schema(text: str) -> str:
    """Return the schema with that of the pool file in it; the chart itself adds the replicas that a model needs."""
    schema, pool = json.loads(text), pool_schema()
    del pool["$schema"], pool["required"], pool["$defs"]["ModelSettings"]["anyOf"]
    schema["$defs"]["pool"] = {"$id": _ID, **pool}  # references within it are to its own definitions
    return json.dumps(schema, indent=2) + "\n"
