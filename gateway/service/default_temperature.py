"""The temperature that each model uses for a request without one, from the best source there is.

In this order: the calibration of simulated replicas; the pool file's `default_temperature`; what an engine itself
reports once it is up; vLLM's own default.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from backends.calibration.load import load_calibration
from backends.health import State
from backends.pool import Pool
from gateway.config.settings import ModelSettings

logger = logging.getLogger(__name__)

VLLM_DEFAULT = 1.0
"""What vLLM takes where neither the model's `generation_config.json` nor a flag says anything."""

_POLL_S = 0.5


def known_temperature(settings: ModelSettings) -> float | None:
    """Return the default temperature of a model as settings give it; None if only an engine knows."""
    given, known = settings.default_temperature, next(_configured(settings), None)
    if known is None:
        return given
    if given not in (None, known):
        logger.warning("default_temperature is %g in the pool file, but %g at the engines", given, known)
    return known


def assumed_temperature(settings: ModelSettings) -> float:
    """Return the default temperature of a model as settings give it, else vLLM's own default."""
    known = known_temperature(settings)
    return VLLM_DEFAULT if known is None else known


def must_ask(settings: ModelSettings) -> bool:
    """Return whether only an engine knows the default temperature of a model."""
    return settings.default_temperature is None and next(_configured(settings), None) is None


async def find_temperature(model: str, settings: ModelSettings, pool: Pool) -> float:
    """Wait for an engine of a model, and return its default temperature.

    To be run where `must_ask` says so.
    """
    while not pool.up(model):  # noqa: ASYNC110 -- the pool has no event for it, and this is done once
        await asyncio.sleep(_POLL_S)
    temperature = known_temperature(settings)
    for backend in pool.up(model):
        if temperature is None and backend.health.state is State.UP:  # it may have left while others were asked
            temperature = await pool.watch(backend).probe.default_temperature()
    if temperature is None:
        logger.warning(
            "%s: no replica reports the temperature it takes by default; %g is assumed. Set default_temperature in the "
            "pool file if it is another.",
            model,
            VLLM_DEFAULT,
        )
        return VLLM_DEFAULT
    logger.info("%s takes temperature %g by default", model, temperature)
    return temperature


def _configured(settings: ModelSettings) -> Iterator[float]:
    """Yield what the calibration of each simulated replica says."""
    for backend in settings.backends.values():
        if backend.simulate is not None:
            yield load_calibration(backend.simulate.calibration).temperature.default
