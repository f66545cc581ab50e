"""Isolation of the tests from the folders of the user who runs them; what they share to save time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import settings

settings.register_profile("project", settings(), deadline=None)  # a busy machine may stop any test for a while
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Redirects the state of all gateways, and the temporary files of other processes, which some tests kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state-home")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.delenv("STATE_DIRECTORY", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """Reads the certificates of authorities once, which each client of httpx does: 17 ms of CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(httpx.create_ssl_context)
        patch.setattr("httpx._transports.default.create_ssl_context", cached)
        yield
