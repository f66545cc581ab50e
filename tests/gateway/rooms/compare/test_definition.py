"""What can be compared, before a gateway is asked."""

from __future__ import annotations

import pytest

from backends.backend import Backend
from backends.speculation import Method
from gateway.config.settings.compare import ComparisonSettings
from gateway.rooms.compare.definition import WrongArmsError, begun


def test_policies_are_not_compared_over_one_replica() -> None:
    alone = [Backend("a", "m", Method.BASELINE, "http://127.0.0.1:8001")]
    question = ComparisonSettings(policies=["learned", "least_loaded"])
    with pytest.raises(WrongArmsError, match="policies choose among replicas, and there is one"):
        begun(question, alone, "learned", 0.0)
