"""docs/configuration.md lists the keys and defaults of the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic.fields import FieldInfo

from backends.speculation import Method, SpeculativeConfig
from gateway.config.load import ConfigError, load_pool
from gateway.config.settings import (
    AdminSettings,
    BackendSettings,
    CorsSettings,
    DiscoverSettings,
    HealthSettings,
    KeySettings,
    KubernetesSettings,
    ModelSettings,
    PoolSettings,
    QueueSettings,
    RecorderSettings,
    ServerSettings,
    ServeSettings,
    Settings,
    SimulateSettings,
    StateSettings,
    TimeoutSettings,
)
from tests.support.paths import DOCS

PAGE = (DOCS / "configuration.md").read_text("utf-8")
SECTIONS: list[tuple[str, type[Settings]]] = [
    ("server.", ServerSettings),
    ("timeouts.", TimeoutSettings),
    ("health.", HealthSettings),
    ("admin.", AdminSettings),
    ("cors.", CorsSettings),
    ("state.", StateSettings),
    ("recorder.", RecorderSettings),
    ("", ModelSettings),
    ("", QueueSettings),
    ("", BackendSettings),
    ("", DiscoverSettings),
    ("", KubernetesSettings),
    ("", ServeSettings),
    ("", SimulateSettings),
    ("", KeySettings),
]


def section(key: str) -> str:
    """Return the section of the page whose table has a row for `key`."""
    parts = re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    return next(part for part in parts if f"\n| `{key}` |" in part)


@pytest.mark.parametrize(("prefix", "model"), SECTIONS, ids=[model.__name__ for _, model in SECTIONS])
def test_every_key_and_its_default(prefix: str, model: type[Settings]) -> None:
    first = prefix + next(iter(model.model_fields))
    rows = dict(re.findall(r"^\| `([a-z_0-9.]+)` \|(.*?)\|", section(first), re.MULTILINE))
    for name, field in model.model_fields.items():
        assert prefix + name in rows
        assert rows[prefix + name].strip() in documented_defaults(field), name


def documented_defaults(field: FieldInfo) -> set[str]:
    """Return the forms in which the page may show the default of a field."""
    if field.is_required():
        return {""}
    default = field.get_default()
    if default is None:
        return {"", "none", "all"}
    if default in ([], {}):
        return {"none"}
    if isinstance(default, list):
        return {f"`[{', '.join(default)}]`"}
    return {f"`{str(default).lower() if isinstance(default, bool) else default}`"}


def test_every_top_level_key() -> None:
    headings = " ".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert all(f"`{name}`" in headings for name in PoolSettings.model_fields)


def test_every_method() -> None:
    assert all(f"`{method}`" in PAGE for method in Method)


def test_every_named_key_of_the_speculative_config_exists() -> None:
    named = set(re.findall(r"\b(?:num_speculative|prompt_lookup|suffix_decoding|parallel)_[a-z_]+", PAGE))
    assert named
    assert named <= set(SpeculativeConfig.model_fields)


def test_the_pool_shown_is_valid(tmp_path: Path) -> None:
    shown, keys = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "pool.yaml"
    path.write_text(shown + keys)
    pool = load_pool(path, {"TEAM_KEY": "k"})
    assert [key.name for key in pool.keys] == ["key-1", "evaluation"]
    assert set(yaml.safe_load(shown)["models"]["llama-3.1-8b"]["backends"]) == {"plain", "lookup", "head", "tree"}


WRONG = """\
models:
  llama:
    policy: {name: thresholds}
    backends:
      plain:
        metod: baseline
        url: http://10.0.0.1:8000/v1
      head:
        method: eagle
        serve: {model: meta-llama/Llama-3.1-8B-Instruct}
        speculative_config: {num_speculative_tokens: 3}
"""


def test_the_errors_shown_are_those_reported(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```\n(config/pool.yaml:.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "pool.yaml"
    path.write_text(WRONG)
    with pytest.raises(ConfigError) as caught:
        load_pool(path, {})
    assert str(caught.value).replace(str(path), "config/pool.yaml") + "\n" == shown
