"""The temperature that each model uses for a request without one.

It is taken from the first of: the calibration of simulated replicas; the pool file's `default_temperature`; what an
engine reports once it is up; vLLM's own default.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from backends.calibration.load import load_calibration
from backends.health import State
from backends.pool import Pool
from gateway.config.settings import ModelSettings
from gateway.gateway import Gateway

logger = logging.getLogger(__name__)

VLLM_DEFAULT = 1.0
"""vLLM's default if neither the model's `generation_config.json` nor a flag sets one."""

_POLL_S = 0.5


def known_temperature(settings: ModelSettings) -> float | None:
    """Return the default temperature of a model by its settings; None if only an engine knows it."""
    return next(_configured(settings), settings.default_temperature)


def assumed_temperature(settings: ModelSettings) -> float:
    """Return the default temperature of a model by its settings, else vLLM's own default."""
    given, known = settings.default_temperature, known_temperature(settings)
    if given not in (None, known):
        logger.warning("default_temperature is %g in the pool file, but %g at the engines", given, known)
    return VLLM_DEFAULT if known is None else known


async def follow_temperature(gateway: Gateway, model: str) -> None:
    """Set the default temperature of a model to its engines', once one is up and after each restart."""
    pool = gateway.pool
    while True:
        while not pool.up(model):  # noqa: ASYNC110 -- the pool has no event for it
            await asyncio.sleep(_POLL_S)
        temperature = await _asked(model, pool)
        engines = {backend.name: backend.engine for backend in pool.up(model)}
        while all(engines.get(backend.name, backend.engine) is backend.engine for backend in pool.up(model)):
            gateway.models[model].default_temperature = temperature  # again: a reload may have replaced the model
            await asyncio.sleep(_POLL_S)


async def _asked(model: str, pool: Pool) -> float:
    """Return the default temperature that an engine of a model reports, else vLLM's own."""
    for backend in pool.up(model):
        if backend.health.state is not State.UP:  # it may have left meanwhile
            continue
        if (temperature := await pool.watch(backend).probe.default_temperature()) is not None:
            logger.info("%s takes temperature %g by default", model, temperature)
            return temperature
    logger.warning(
        "%s: no replica reports the temperature it takes by default; %g is assumed. Set default_temperature in the "
        "pool file if it is another.",
        model,
        VLLM_DEFAULT,
    )
    return VLLM_DEFAULT


def _configured(settings: ModelSettings) -> Iterator[float]:
    """Yield the default temperature in the calibration of each simulated replica."""
    for backend in settings.backends.values():
        if backend.simulate is not None:
            yield load_calibration(backend.simulate.calibration).temperature.default
