"""How much longer a token takes when the steps of a backend change, at the same arrivals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.learned.replica import Load

Floats = npt.NDArray[np.float64]

OF: Final = "time per output token"
_ROUNDS: Final = 40
_LARGEST: Final = 100.0


def relative_time(load: Load, present_s: float, step_s: Callable[[Floats], Floats], fewer: Floats) -> Floats:
    """Return draws of the time per token after a change over the present one.

    Slower answers mean more requests in the batch, by Little's law, and slower steps more prompts in each: both are
    solved for. `step_s` returns the seconds of steps, as the four numbers of a `StepCost` times those given to it.
    """
    ratio = np.ones_like(fewer)
    for _ in range(_ROUNDS):
        loads = np.stack([np.ones_like(ratio), load[0] * ratio, load[1] * ratio, load[2] * ratio / fewer])
        ratio = np.clip(0.5 * (ratio + step_s(loads) / present_s * fewer), 1.0 / _LARGEST, _LARGEST)
    return ratio
