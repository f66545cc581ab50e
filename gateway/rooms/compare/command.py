"""The commands of comparisons."""

from __future__ import annotations

from typing import Any, Final

from gateway.rooms.compare.canary import canary
from gateway.rooms.compare.comparing import app

COMMANDS: Final[dict[str, Any]] = {"compare": app, "canary": canary}
