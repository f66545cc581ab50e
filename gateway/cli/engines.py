"""The comparison of a pool file with the engines that run, for `gateway check`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from backends import contradictions
from backends.backend import Backend
from backends.probe import Probe, ProbeResult

_TIMEOUT_S = 2.0
_LONGEST_S = 10.0


def compare(backends: Sequence[Backend]) -> tuple[str, list[str]]:
    """Ask the engines of some replicas; return how many answered, and what is not as the pool file says."""
    results = asyncio.run(_probed(backends))
    warnings = []
    for backend, result in zip(backends, results, strict=True):
        name = f"{backend.model}/{backend.name}"
        if result.problem is not None and not result.refused:
            warnings.append(f"{name}: {result.problem}")
        if result.engine is not None and contradictions.compare(backend, result.engine):
            warnings.append(f"{name}: {backend.contradiction}")
    compared = sum(result.engine is not None for result in results)
    return f"Compared with the metrics of {compared} of {len(backends)} engines.", warnings


async def _probed(backends: Sequence[Backend]) -> list[ProbeResult]:
    return await asyncio.gather(*(_probe(backend) for backend in backends))


async def _probe(backend: Backend) -> ProbeResult:
    probe = Probe(backend, _TIMEOUT_S)
    try:
        async with asyncio.timeout(_LONGEST_S):
            result = await probe.run(admit=True)
        backend.set_engine(probe.context_tokens, probe.version)
        return result
    except TimeoutError:
        return ProbeResult("does not answer in time")
    finally:
        await probe.close()
