"""What methods and their settings are in one release of vLLM otherwise than in others."""

from __future__ import annotations

from typing import Any

import pytest

from backends.speculation import Method, release_notes


@pytest.mark.parametrize(
    ("method", "config", "version", "note"),
    [
        (Method.MEDUSA, {}, "", "removes medusa"),
        (Method.MLP_SPECULATOR, {}, "0.33.1", "no more since 0.33"),
        (Method.EAGLE3, {"enable_adaptive_verification": True}, "0.29.0", "begins with 0.30"),
        (Method.EAGLE3, {"enable_adaptive_verification": True}, "0.30.0", "PROFILE_CONTEXT_LEN"),
        (Method.EAGLE3, {}, "0.33.0", None),
    ],
)
def test_notes_name_what_a_release_does_otherwise(
    method: Method, config: dict[str, Any], version: str, note: str | None
) -> None:
    notes = list(release_notes(method, config, version))
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
