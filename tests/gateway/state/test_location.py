"""The location of the store, and its description in `gateway check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.defaults import default_file, with_state_file
from gateway.config.load import ConfigError, load_pool
from gateway.config.settings import StateSettings
from gateway.service.stores import describe, open_store
from gateway.state.sqlite import SqliteStore

POOL = """\
models: {m: {policy: {name: round_robin}, backends: {a: {method: baseline, url: "http://h:1"}}}}
"""


def state_of(tmp_path: Path, line: str, **environ: str) -> StateSettings | None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL + line)
    return with_state_file(load_pool(path, environ), path, {"XDG_STATE_HOME": str(tmp_path / "home"), **environ}).state


def test_each_pool_file_has_its_own_state_file(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": "/state"}
    one = default_file(tmp_path / "one" / "pool.yaml", environ)
    assert one.parent == Path("/state/speculation-gateway")
    assert one.name.startswith("pool-")
    assert one != default_file(tmp_path / "two" / "pool.yaml", environ)
    assert one == default_file(tmp_path / "two" / ".." / "one" / "pool.yaml", environ)
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "one" / "pool.yaml")
    before = default_file(link, environ)
    link.unlink()
    link.symlink_to(tmp_path / "two" / "pool.yaml")
    assert before == default_file(link, environ)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"STATE_DIRECTORY": "/var/lib/gateway", "XDG_STATE_HOME": "/state"}, "/var/lib/gateway"),
        ({"STATE_DIRECTORY": "/var/lib/one:/var/lib/two"}, "/var/lib/one"),
        ({"XDG_STATE_HOME": ""}, "~/.local/state/speculation-gateway"),
        ({}, "~/.local/state/speculation-gateway"),
    ],
)
def test_the_default_folder(environ: dict[str, str], folder: str) -> None:
    assert default_file(Path("pool.yaml"), environ).parent == Path(folder).expanduser()


def test_the_store_of_each_setting(tmp_path: Path) -> None:
    assert state_of(tmp_path, "state: none") is None
    assert open_store(None) is None
    default = state_of(tmp_path, "")
    assert default.file.parent == tmp_path / "home" / "speculation-gateway"
    empty = state_of(tmp_path, 'state: {file: "${FILE:-}", redis: "${URL:-}"}')
    assert empty == default
    named = state_of(tmp_path, "state: {file: ~/mine.sqlite}")
    store = open_store(named)
    assert isinstance(store, SqliteStore)
    assert store.location == str(Path("~/mine.sqlite").expanduser())
    state = state_of(tmp_path, 'state: {redis: "${URL}", prefix: other}', URL="redis://:secret@h:1/2")
    redis = open_store(state)
    assert (redis.kind, redis.location) == ("redis", "redis://h:1/2")
    assert "secret" not in f"{state!r} {state.model_dump_json()} {describe(state)}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("state:", "state: expected `none`, or a mapping with `file` or `redis`"),
        ("state: {redis: 'redis://x:pa55word/'}", "state.redis: expected redis://host:port/database"),
        ("state: {file: a, redis: 'redis://x'}", "state.redis: set together with file; keep one of the two"),
        ("state: {fil: a}", "state.fil: unknown key; did you mean 'file'?"),
    ],
)
def test_errors_do_not_contain_passwords(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        state_of(tmp_path, line)
    assert message in str(caught.value)
    assert "pa55" not in str(caught.value)
